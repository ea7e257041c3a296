"""Intervals over seeds and images, families of tests, and what a number of seeds can see."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from itm_lab.evidence.statistics import (
    Interval,
    holm,
    image_contributions,
    p_value,
    seed_interval,
    smallest_effect,
    two_way_bootstrap,
)
from itm_utils.errors import ItmError
from itm_utils.metrics.retrieval import Ranks, summarise


def crossed(random: np.random.Generator, seeds: int, images: int, of_seed: float, of_image: float, noise: float):
    """Differences with true mean 0: an effect of the seed, one of the image, and noise."""
    return (
        of_seed * random.standard_normal((seeds, 1))
        + of_image * random.standard_normal((1, images))
        + noise * random.standard_normal((seeds, images))
    )


def test_contributions_of_images_average_to_the_metric():
    random = np.random.default_rng(0)
    owner = np.repeat(np.arange(40), 5)
    ranks = Ranks(i2t=random.integers(0, 20, 40), t2i=random.integers(0, 20, 200))
    for metric, value in summarise(ranks, "").as_dict().items():
        if metric == "rsum" or metric[3:5] == "_r":
            assert image_contributions(ranks, owner, metric).mean() == pytest.approx(value, abs=1e-9)
    with pytest.raises(ItmError, match="metric"):
        image_contributions(ranks, owner, "f1")


@pytest.mark.parametrize("of_seed, of_image", [(3.0, 0.0), (0.0, 60.0), (3.0, 60.0)])
def test_two_way_intervals_cover_the_truth(of_seed: float, of_image: float):
    """Five seeds, 100 images, 300 simulated trials: 95 % intervals miss the true 0 in at most 8 %."""
    random = np.random.default_rng(1)
    missed = 0
    for _ in range(300):
        _, low, high = two_way_bootstrap(crossed(random, 5, 100, of_seed, of_image, 10.0), samples=300)
        missed += not low <= 0 <= high
    assert missed / 300 <= 0.08


def test_seeds_alone_are_too_sure_where_images_differ():
    """What every seed says of the same few images may be an accident of these images."""
    random = np.random.default_rng(2)
    table = crossed(random, 5, 100, 0.5, 60.0, 5.0)
    assert two_way_bootstrap(table).halfwidth > 3 * seed_interval(table.mean(axis=1)).halfwidth


def test_without_images_that_differ_it_is_nearly_student():
    random = np.random.default_rng(3)
    table = crossed(random, 5, 400, 3.0, 0.0, 0.01)
    assert two_way_bootstrap(table).halfwidth == pytest.approx(seed_interval(table.mean(axis=1)).halfwidth, rel=0.1)


def test_two_way_bootstrap_refuses_one_seed():
    with pytest.raises(ItmError, match="seeds, images"):
        two_way_bootstrap(np.ones((1, 10)))
    assert two_way_bootstrap(np.ones((3, 10))) == (1.0, 1.0, 1.0)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
    with pytest.raises(ItmError, match="probabilities"):
        holm([1.2])


def test_p_value_of_an_interval_that_touches_zero():
    assert p_value(Interval(1.0, 0.0, 2.0)) == pytest.approx(0.05)
    assert p_value(Interval(1.0, 1.0, 1.0)) == 0.0


def test_smallest_effect_has_the_power_it_says():
    effect = smallest_effect(spread=2.0, seeds=5)
    draws = np.random.default_rng(4).normal(effect, 2.0, (20_000, 5))
    found = stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.02)
    assert smallest_effect(2.0, 10) < effect
    with pytest.raises(ItmError, match="smallest_effect"):
        smallest_effect(float("nan"), 5)

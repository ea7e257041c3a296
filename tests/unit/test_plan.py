"""What `itm run --dry-run` counts, against a pencil."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from itm_lab.data.registry import KNOWN
from itm_lab.experiments.cost import (
    BERT_TOKEN,
    PUBLISHED,
    WORDS,
    Counted,
    Sizes,
    cost,
    count_rates,
    count_step,
    counted,
    disk,
    plan,
    sizes_of,
    tokens_of,
    trainings,
)
from itm_lab.experiments.runner import Job
from itm_utils.scoring import BATCH as BLOCK
from itm_utils.scoring import BUDGET

ROOT = Path(__file__).resolve().parents[2]
SIZES = Sizes(10, 50, 4, 20, 3, 15, regions=3, image_dim=6, vocabulary=30)
WIDTH, WORD, BATCH = 16, 8, 4
SMALL = [f"width={WIDTH}", f"word_dim={WORD}", f"batch_size={BATCH}", "epochs=3"]
LISTS = ["captions_mined=10", "captions_kept=5", "first_epochs=2", "first_batch_size=5", "caption_width=8"]


def job_of(name: str, *changes: str) -> Job:
    return plan(ROOT, [name], "", "0", list(changes), [])[0]


def parts_of(job: Job) -> list[Counted]:
    return [counted(training, SIZES, tokens_of(job)) for training in trainings(job, SIZES)]


def test_every_multiplication_of_vsepp() -> None:
    """A linear map of the picture, a GRU over the caption, one product of vectors a pair."""
    (training,) = trainings(job_of("01_vsepp_f30k_vsepp", *SMALL), SIZES)
    image = 2 * SIZES.image_dim * WIDTH
    caption = 2 * WORDS * 3 * WIDTH * (WORD + WIDTH)
    pair = 2 * WIDTH
    assert count_rates(training.judged, SIZES, 0)[:5] == (image, caption, pair, False, 4 * WIDTH)
    operations, held, weights = count_step(training, SIZES, 0)
    # Back: twice the way forth, but no slope is asked for pictures, nor for the state before the first word.
    spared = image + 2 * 3 * WIDTH * WIDTH
    assert operations == BATCH * (3 * (image + caption) - spared) + 3 * pair * BATCH**2
    table, gru = SIZES.vocabulary * WORD, 3 * WIDTH * (WORD + WIDTH + 2)
    assert weights == 4 * ((SIZES.image_dim + 1) * WIDTH + table + gru)
    assert held > 4 * weights


def test_a_run_is_its_steps_its_looks_at_dev_and_its_test() -> None:
    (part,) = parts_of(job_of("01_vsepp_f30k_vsepp", *SMALL))
    image, caption, pair, *_ = part.rates
    dev, test = (image * n + caption * c + pair * n * c for n, c in ((4, 20), (3, 15)))
    assert part.steps == 3 * (50 // BATCH)
    assert part.total == part.steps * part.step + 3 * dev + test


@pytest.mark.parametrize("every", [0, 1, 5, 12, 30, 36, 99])
@pytest.mark.parametrize("name", ["08_mmca_f30k", "09_dcpa_f30k_intra"])
def test_looks_at_dev_come_as_often_as_a_run_asks_for_them(name: str, every: int) -> None:
    small = ["width=16", "heads=2", "token_dim=12", f"batch_size={BATCH}", "epochs=3"]
    (part,) = parts_of(job_of(name, *small, f"validate_every={every}"))
    # As the training loop does: at every so many steps, and at the last.
    looks = sum(step % (every or 12) == 0 or step == 36 for step in range(1, 37))
    dev, test = (part.rates.every_pair(n, c) for n, c in ((4, 20), (3, 15)))
    assert part.total == pytest.approx(36 * part.step + looks * dev + test)


def test_memory_holds_every_encoded_image_of_a_split_that_is_judged() -> None:
    """On small batches that, and not a step, decides: a vector a region, their mask, and a block of pairs."""
    (training,) = trainings(job_of("02_scan_f30k_t2i_avg", *SMALL), SIZES)
    _, step, weights = count_step(training, SIZES, 0)
    assert counted(training, SIZES, 0).held == step
    many = replace(SIZES, dev_images=100_000, dev_captions=5)
    part = counted(training, many, 0)
    encoded, block = SIZES.regions * (4 * WIDTH + 1), 5 * BLOCK * part.rates.pair_bytes
    assert part.rates.image_bytes == encoded
    assert part.held == 4 * weights + 100_000 * encoded + block
    assert part.rates._replace(pair_bytes=BUDGET).held(2, 5) == 2 * encoded + BUDGET
    judged = counted(training, replace(SIZES, test_images=100_000, test_captions=5), 0)
    assert judged.held == part.held  # the scores of the receipt are made the same way


def test_two_stages_are_counted_each_and_the_second_is_judged_with_the_first() -> None:
    small = ["width=16", "heads=2", "feed_forward=8", "inter_feed_forward=8", "channels=4", "token_dim=12"]
    small += ["batch_size=5", "epochs=3", "inter_batch_size=4", "inter_epochs=2"]
    job = job_of("09_dcpa_f30k", *small)
    intra, inter = parts_of(job)
    assert (intra.steps, inter.steps) == (3 * 10, 2 * 12)
    second = count_rates(inter.training.matcher, SIZES, 12)
    assert inter.rates.pair == pytest.approx(intra.rates.pair + second.pair)
    assert inter.rates.decoupled and not intra.rates.decoupled
    (alone,) = parts_of(job_of("09_dcpa_f30k_intra", *small))
    assert alone.total == intra.total
    states = 2 * 12 * WORDS * (50 + 20 + 15)
    scores = 2 * 4 * 3 * 15  # two directions
    assert disk(job, SIZES, [intra, inter]) == 9 * (intra.weights + inter.weights) + states + scores


def test_mining_scores_every_pair_of_the_training_set() -> None:
    job = job_of("10_aoq_f30k_vsrn_adapoffquin", *SMALL, *LISTS)
    miner, final = parts_of(job)
    assert (miner.training.mines, final.training.mines) == (True, False)
    assert (miner.steps, final.steps) == (2 * 10, 3 * 12)
    passes = [miner.rates.every_pair(n, c) for n, c in ((4, 20), (4, 20), (3, 15), (10, 50))]  # dev twice, test, train
    assert miner.total == pytest.approx(miner.steps * miner.step + sum(passes))
    assert miner.rates.pair == 2 * WIDTH  # one vector each
    lists = 10 * 10 + 2 * 50
    assert disk(job, SIZES, [miner, final]) == 9 * (miner.weights + final.weights) + 4 * 3 * 15 + 12 * lists
    # A step with listed pairs encodes three times as many; the caption writer sees the batch alone.
    (online,) = parts_of(job_of("10_aoq_f30k_vsrn_short", *SMALL, *LISTS, "round_one="))
    assert 2 * online.step < final.step < 3.5 * online.step


def test_constraints_cost_something() -> None:
    base, both = (parts_of(job_of(f"11_ccr_ccs_f30k_scan_{variant}", *SMALL))[0] for variant in ("baseline", "both"))
    assert base.step < both.step < 2 * base.step


def test_a_quarter_of_the_data_is_a_quarter() -> None:
    whole, quarter = (sizes_of(job_of(f"09_dcpa_f30k{end}")) for end in ("", "_quarter"))
    assert (whole.images, whole.captions) == (29_000, 145_000)
    assert (quarter.images, quarter.captions) == (7_250, 36_250)
    assert quarter.dev_captions == whole.dev_captions


@pytest.mark.parametrize("name", ["f30k", "coco"])
def test_published_sizes_are_those_of_the_package(name: str) -> None:
    """With fewer pictures, where a split has several sizes: what is said is a lower bound."""
    known, sizes = KNOWN[name].images, PUBLISHED[name]
    test = "testall" if "testall" in known else "test"
    found = {"train": sizes.images, "dev": sizes.dev_images, test: sizes.test_images}
    assert found == {split: min(known[split]) for split in found}
    counted = (sizes.captions, sizes.dev_captions, sizes.test_captions)
    assert counted == tuple(5 * images for images in found.values())


def test_the_text_encoder_reads_every_caption_once() -> None:
    """Of BERT base 85 million weights take part in every token: twelve layers without the word table."""
    assert abs(BERT_TOKEN / (2 * 85e6) - 1) < 0.01


def test_a_plan_says_memory_disk_and_hours_and_can_measure_them() -> None:
    changes = ["width=8", "word_dim=4", "batch_size=4", "epochs=1"]
    guessed, timed = (cost(job_of("02_scan_f30k_t2i_avg", *changes), "V100", measure) for measure in (False, True))
    assert re.search(
        r"GiB, at most \d+\.\d GB on disk, at least \d+ min on one V100 if they reach 25% of its peak", guessed
    )
    assert "a guess" in guessed and "guess" not in timed
    assert re.search(r"about [\d.]+ (h|min) on .+: timed steps reach [\d.e-]+ · 10\^12 operations a second", timed)

"""What makes a run faster leaves its scores as they are, as far as the page on using the book promises."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import small

from itm_utils.data.batches import PairDataset
from itm_utils.errors import ItmError
from itm_utils.matcher import Matcher, OfflineNegatives, PairBatch
from itm_utils.models.bfan import BFAN
from itm_utils.models.dcpa import DCPA, IntraPAM
from itm_utils.models.keeping_score import MeanPool
from itm_utils.models.mmca import MMCA, HardNegativeTripletLoss
from itm_utils.models.pfan import PFAN
from itm_utils.models.saem import SAEM
from itm_utils.models.scan import SCAN
from itm_utils.models.sgraf import SGRAF
from itm_utils.models.vsepp import VSEPP, HingeTriplet
from itm_utils.models.vsrn import VSRN
from itm_utils.training import loop
from itm_utils.training.loop import TrainConfig, compiled_scores, train

PAGE = (Path(__file__).resolve().parents[2] / "book/how-to-use.md").read_text(encoding="utf-8")


def promised(parameter: str) -> float:
    """By how much a score may differ, from the line of a table that begins with this parameter."""
    return float(re.search(rf"^\| `{parameter}.*\| at most ([\d.]+)", PAGE, re.MULTILINE)[1])


def made(matcher: type[Matcher], pairs: PairDataset, **options: Any) -> Matcher:
    torch.manual_seed(0)
    return small(matcher, 30, pairs.split.feature_dim, **options)


def scores_of(model: Matcher, batch: PairBatch) -> torch.Tensor:
    return model.score(model.encode_images(batch.images), model.encode_texts(batch.texts)).i2t.float()


COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")

# Every model of part I; those that group the captions of a batch by length have a number of groups to be compiled for.
GROUPED = [
    pytest.param(SCAN, {}, id="SCAN"),
    pytest.param(BFAN, {}, id="BFAN"),
    pytest.param(PFAN, {}, id="PFAN"),
    pytest.param(SGRAF, {"head": "SAF"}, id="SAF"),
    pytest.param(SGRAF, {"head": "SGR"}, id="SGR"),
]
STAGES = [pytest.param(matcher, {}, id=matcher.__name__) for matcher in (MMCA, IntraPAM, DCPA)]  # of chapters 08 and 09
OTHERS = [pytest.param(matcher, {}, id=matcher.__name__) for matcher in (MeanPool, VSEPP, VSRN, SAEM)]


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize(("matcher", "options"), [*GROUPED, *OTHERS, pytest.param(MMCA, {}, id="MMCA")])
def test_compiled_scores(matcher: type[Matcher], options: dict[str, Any], any_pairs: PairDataset) -> None:
    """Every number of groups of captions is compiled anew: here there is one."""
    model = made(matcher, any_pairs, **options).eval()
    lengths = np.asarray(any_pairs.texts.lengths)
    alike = np.flatnonzero(lengths == np.bincount(lengths).argmax()).tolist()
    batches = [any_pairs[alike[:count]] for count in (4, 6)]
    with torch.no_grad():
        eager = [scores_of(model, batch) for batch in batches]
        with compiled_scores(model, True):
            compiled = [scores_of(model, batch) for batch in batches]
    for one, other in zip(eager, compiled, strict=True):
        assert (one - other).abs().max() <= promised("compiled=true")
    assert not {*model.compiles} & set(vars(model))  # a copy of the model must not call the original's


@pytest.mark.slow
@pytest.mark.parametrize(("matcher", "options"), [*GROUPED, *STAGES])
def test_compiling_ends(
    matcher: type[Matcher], options: dict[str, Any], any_pairs: PairDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captions of other lengths are other groups: after a few of them nothing is compiled any more.

    Graphs are counted where they are traced, so that no compiler has to translate them.
    """
    monkeypatch.setattr(loop, "COMPILATIONS", 2)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    model, losses, graphs = made(matcher, any_pairs, **options), HingeTriplet(), []
    with compiled_scores(model, True):
        for start in range(0, 40, 4):  # training steps: batches and captions of other sizes
            loss, _ = losses(model, any_pairs[list(range(start, start + 4 + start % 3))])
            loss.backward()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] and len(set(graphs[5:])) == 1, graphs


def test_a_model_may_refuse_to_be_compiled(any_pairs: PairDataset) -> None:
    class Endless(VSEPP):
        compiles = ()

    model = made(Endless, any_pairs)
    with compiled_scores(model, False):
        pass
    with (
        pytest.raises(ItmError, match="compiled: found true for Endless, expected false"),
        compiled_scores(model, True),
    ):
        pass


@COMPILER
@pytest.mark.slow
def test_a_training_may_be_compiled_and_go_on_without(any_pairs: PairDataset, tmp_path: Path) -> None:
    config = TrainConfig(epochs=1, batch_size=50, learning_rate=0.01, schedule="constant", device="cpu", seed=1)
    ends = []
    for number, compiled in enumerate((False, True)):
        model = made(VSEPP, any_pairs)
        train(model, HingeTriplet(), any_pairs, replace(config, compiled=compiled), tmp_path / str(number))
        ends.append(torch.cat([weight.flatten() for weight in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-3)
    again = train(made(VSEPP, any_pairs), HingeTriplet(), any_pairs, config, tmp_path / "1")  # compiled before
    assert [record["step"] for record in again.log] == [1, 2, 3, 4]


@COMPILER
@pytest.mark.slow
def test_a_compiled_step_with_selected_negatives(any_pairs: PairDataset) -> None:
    """MMCA selects tile by tile and scores pairs with gradients: a graph each, for batches of other sizes too."""
    model, loss_of = made(MMCA, any_pairs), HardNegativeTripletLoss()
    batches = [any_pairs[list(range(start, start + pairs))] for start, pairs in ((0, 5), (20, 7), (60, 6))]

    def gradients(batch: PairBatch) -> torch.Tensor:
        loss, _ = loss_of(model, batch)
        found = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([loss.detach()[None], *(gradient.flatten() for gradient in found)])

    eager = [gradients(batch) for batch in batches]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with compiled_scores(model, True):
        compiled = [gradients(batch) for batch in batches]
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(model.compiles)


def test_pinned_batches_hold_the_same_numbers(any_pairs: PairDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    batch = replace(any_pairs[[0, 7]], offline=OfflineNegatives(any_pairs[[1, 8]], any_pairs[[2, 9]]))
    copy = batch.pin_memory()
    for one, other in (
        (batch, copy),
        (batch.offline.first, copy.offline.first),
        (batch.offline.second, copy.offline.second),
    ):
        for side in ("images", "texts"):
            for name, tensor in vars(getattr(one, side)).items():
                if tensor is not None:
                    same = getattr(getattr(other, side), name)
                    assert torch.equal(tensor, same)
                    stays = name == "lengths"  # on the host, where nothing is copied from it
                    assert any(tensor is seen for seen in pinned) != stays

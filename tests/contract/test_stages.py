"""The chapters that have one training describe it alike: a hinge loss, and the settings of the parameters."""

from __future__ import annotations

from types import ModuleType

import pytest
from contract_cases import Case
from cross_attention import TRAINING

from itm_utils.models import bfan, pfan, scan, sgraf
from itm_utils.models.vsepp import HingeTriplet

CHAPTERS = {scan: scan.SCAN, bfan: bfan.BFAN, pfan: pfan.PFAN, sgraf: sgraf.SGRAF}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_stages_hold_the_one_training_of_the_chapter(chapter: ModuleType) -> None:
    model = Case(CHAPTERS[chapter]).build()
    (stage,) = chapter.stages(TRAINING, model)
    assert stage.model is model and isinstance(stage.objective, HingeTriplet)
    assert (stage.objective.margin, stage.objective.hardest, stage.objective.warmup_epochs) == (0.3, True, 2)
    assert (stage.config.epochs, stage.config.decay_every, stage.config.schedule) == (4, 3, "step")

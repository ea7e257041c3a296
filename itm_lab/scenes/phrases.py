"""Noun phrases of Scenes with the boxes of the objects they name."""

from __future__ import annotations

import numpy as np

from itm_lab.scenes.build import ScenesSpec
from itm_lab.scenes.load import load_scenes
from itm_utils.data.phrases import Grounding, Phrase


def scenes_grounding(name: str, spec: ScenesSpec | None = None) -> Grounding:
    """Every noun phrase of a split of Scenes with the tight boxes of its toys."""
    data = load_scenes(name, spec)
    phrases = [
        [Phrase(p.start, p.end, data.boxes[scene][list(p.toys)].astype(np.float64)) for p in caption.phrases]
        for caption, scene in zip(data.captions, data.owner, strict=True)
    ]
    return Grounding(phrases)

"""Region proposals as a detector gives them: most toys found, some twice, and many distractors.

A distractor shows a part of a toy, a toy and its surroundings, two toys or none; it overlaps no toy well enough to be
called its box. So attention can be wrong: on a box that shows something of what a phrase names, and is not it.
Boxes are integers ``x1 y1 x2 y2`` in pixels, one past the last pixel; their order says nothing.
"""

from __future__ import annotations

import numpy as np

from itm_lab.scenes.portable_random import PortableRandom
from itm_lab.scenes.world import CANVAS, Knobs

Box = tuple[int, int, int, int]

# What a proposal that is nobody's box shows, in parts of a hundred.
DISTRACTORS = {"partial": 52, "shifted": 44, "union": 2, "background": 1, "whole": 1}
TIGHT, LOOSE = 10, 16  # percent of its side by which a side of a toy's box is off: the best box, and further ones
LARGEST_OVERLAP = 49  # percent of IoU that a distractor may have with a toy
SMALLEST = 6  # pixels, width and height


def propose(rng: PortableRandom, toys: np.ndarray, knobs: Knobs) -> np.ndarray:
    """(regions, 4) int64 proposals for an image whose toys have the tight boxes ``toys`` (n, 4)."""
    found = [(int(x1), int(y1), int(x2), int(y2)) for x1, y1, x2, y2 in toys]
    boxes = [_jitter(rng, box, TIGHT) for box in found if not rng.chance(knobs.missed)]
    boxes += [_jitter(rng, box, LOOSE) for box in found if rng.chance(knobs.doubles)]
    boxes = boxes[: knobs.regions]
    while len(boxes) < knobs.regions:
        tried = _distractor(rng, rng.weighted(DISTRACTORS), found)
        if tried is not None and all(
            100 * _iou(tried, toy)[0] <= LARGEST_OVERLAP * _iou(tried, toy)[1] for toy in found
        ):
            boxes.append(tried)
    return np.array(rng.shuffled(boxes), dtype=np.int64)


def _distractor(rng: PortableRandom, kind: str, toys: list[Box]) -> Box | None:
    """One box that belongs to no toy; None when there was no room for it."""
    box = rng.pick(toys)
    if kind == "partial":
        return _part(rng, box)
    if kind == "shifted":
        return _shifted(rng, box)
    if kind == "union":
        other = rng.pick(toys)
        joined = (min(box[0], other[0]), min(box[1], other[1]), max(box[2], other[2]), max(box[3], other[3]))
        return _jitter(rng, joined, 8) if other != box else None
    if kind == "background":
        return _background(rng, toys)
    return _jitter(rng, (0, 0, CANVAS, CANVAS), 15)


def _shifted(rng: PortableRandom, box: Box) -> Box:
    """As large as a toy and beside it: some of the toy, some of its surroundings."""
    x1, y1, x2, y2 = box
    right = (x2 - x1) * rng.between(-50, 50) // 100
    down = (y2 - y1) * rng.between(-50, 50) // 100
    return _clip(x1 + right, y1 + down, x2 + right, y2 + down)


def _jitter(rng: PortableRandom, box: Box, percent: int) -> Box:
    """Move each side by at most ``percent`` of the box's width or height."""
    width, height = box[2] - box[0], box[3] - box[1]
    reach = (width, height, width, height)
    # Tenths of a percent, so that small boxes are not all moved by the same few pixels.
    moved = [side + _share(rng.between(-10 * percent, 10 * percent) * r) for side, r in zip(box, reach, strict=True)]
    return _clip(*moved)


def _share(thousandths: int) -> int:
    """Divide by 1,000 and round to the nearest integer."""
    return (2 * thousandths + 1000) // 2000


def _part(rng: PortableRandom, box: Box) -> Box:
    """Not quite half of a toy: left, right, upper or lower."""
    x1, y1, x2, y2 = box
    width, height = (x2 - x1) * rng.between(30, 58) // 100, (y2 - y1) * rng.between(30, 58) // 100
    return rng.pick(
        [
            _clip(x1, y1, x1 + width, y2),
            _clip(x2 - width, y1, x2, y2),
            _clip(x1, y1, x2, y1 + height),
            _clip(x1, y2 - height, x2, y2),
        ]
    )


def _background(rng: PortableRandom, toys: list[Box]) -> Box | None:
    """A box with (nearly) no toy in it."""
    for _ in range(12):
        width, height = rng.between(10, 36), rng.between(10, 36)
        x, y = rng.below(CANVAS - width), rng.below(CANVAS - height)
        box = (x, y, x + width, y + height)
        if all(20 * overlap(box, toy) <= area(box) for toy in toys):
            return box
    return None


def _clip(x1: int, y1: int, x2: int, y2: int) -> Box:
    """Inside the canvas and not smaller than ``SMALLEST``."""
    x1, y1 = max(0, min(x1, CANVAS - SMALLEST)), max(0, min(y1, CANVAS - SMALLEST))
    return x1, y1, min(CANVAS, max(x2, x1 + SMALLEST)), min(CANVAS, max(y2, y1 + SMALLEST))


def area(box: Box) -> int:
    """Pixels of a box."""
    return (box[2] - box[0]) * (box[3] - box[1])


def overlap(a: Box, b: Box) -> int:
    """Pixels two boxes share."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(0, width) * max(0, height)


def _iou(a: Box, b: Box) -> tuple[int, int]:
    """Shared and joint pixels of two boxes: IoU without a division, the same everywhere."""
    shared = overlap(a, b)
    return shared, area(a) + area(b) - shared

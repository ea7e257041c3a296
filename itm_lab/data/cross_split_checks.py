"""Splits of one dataset beside each other: features that fit together, and nothing that is in two of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from itm_lab.data.disk import counted
from itm_lab.data.registry import Known
from itm_lab.data.report import DAMAGED, NOTE, OK, CheckResult
from itm_utils.data.precomp import PrecompSplit

FEW = 0.01  # share of images that may look like another: photographs do occur twice

# Split → (images,) a number for the content of each, as the scan has it; empty where the features were not read.
Contents = dict[str, np.ndarray]


def check_between(known: Known, splits: dict[str, PrecompSplit], contents: Contents) -> Iterator[CheckResult]:
    """What one split alone cannot show. A split that is the beginning of another shares everything with it."""
    yield from _shapes(splits)
    yield from _beginnings(known, splits, contents)
    apart = {name: split for name, split in splits.items() if name not in known.within}
    yield from _shared_names(apart)
    yield from _shared_features({name: contents[name] for name in apart if name in contents})
    yield from _shared_captions(apart)


def _shapes(splits: dict[str, PrecompSplit]) -> Iterator[CheckResult]:
    """Regions and feature width: a model that was trained on one split could not be applied to another."""
    if not splits:
        return
    first, *others = splits.values()
    for other in others:
        if other.features.shape[1:] != first.features.shape[1:]:
            here, there = (" x ".join(f"{side:,}" for side in s.features.shape[1:]) for s in (other, first))
            found = f"{here} numbers an image, but {there} in {first.name}: one model cannot read both"
            yield CheckResult(other.features.path.name, DAMAGED, found)


def _beginnings(known: Known, splits: dict[str, PrecompSplit], contents: Contents) -> Iterator[CheckResult]:
    """Of a split that should be the first images of another: captions, and features if they were read."""
    for part, other in known.within.items():
        if part not in splits or other not in splits:
            continue
        if splits[other].captions[: splits[part].n_captions] != splits[part].captions:
            yield CheckResult(part, NOTE, f"{part} is not the beginning of {other}")
        elif (image := _first_difference(part, other, contents)) is not None:
            found = f"the captions of the beginning of {other}, but other features, first image {image:,}"
            yield CheckResult(f"{part}_ims.npy", DAMAGED, found)
        else:
            read = "" if part in contents else " by its captions"
            yield CheckResult(part, OK, f"{part} is the beginning of {other}{read}")


def _first_difference(part: str, other: str, contents: Contents) -> int | None:
    """The first image of a split whose features the other has not at this place; None if all agree or none were read."""
    if part not in contents or other not in contents:
        return None
    images = min(len(contents[part]), len(contents[other]))
    differing = np.flatnonzero(contents[part][:images] != contents[other][:images])
    return int(differing[0]) if len(differing) else None


def _shared_names(splits: dict[str, PrecompSplit]) -> Iterator[CheckResult]:
    """An image is in one split only."""
    home: dict[str, str] = {}
    for name, split in splits.items():
        both = [image_id for image_id in split.ids or () if home.setdefault(image_id, name) != name]
        if both:
            found = f"{counted(len(both), 'image')} also in {home[both[0]]}, first {both[0]}"
            yield CheckResult(f"{name}_ids.txt", DAMAGED, found)


def _shared_features(contents: Contents) -> Iterator[CheckResult]:
    """The same features in two splits are a leak; of a few images a note, for a photograph may have been posted twice."""
    for one, other in combinations(contents, 2):
        shared = np.flatnonzero(np.isin(contents[other], contents[one]))
        if not len(shared):
            continue
        earlier = int(np.flatnonzero(contents[one] == contents[other][shared[0]])[0])
        state = NOTE if len(shared) <= FEW * len(contents[other]) else DAMAGED
        where = f"first image {int(shared[0]):,} as {earlier:,}"
        found = f"{counted(len(shared), 'image')} with the features of images of {one}, {where}"
        yield CheckResult(f"{other}_ims.npy", state, found)


def _shared_captions(splits: dict[str, PrecompSplit]) -> Iterator[CheckResult]:
    """Two people may describe two images in the same words: worth knowing, no damage."""
    for one, other in combinations(splits, 2):
        known = set(splits[one].captions)
        lines = [line for line, caption in enumerate(splits[other].captions, start=1) if caption in known]
        if lines:
            found = f"{counted(len(lines), 'caption')} that {one} has too, first line {lines[0]:,}"
            yield CheckResult(f"{other}_caps.txt", NOTE, found)

"""A large collection to search in: captions of Scenes' grammar, no two alike, that are in no split of the dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from itm_lab.scenes.captions import sample_caption
from itm_lab.scenes.portable_random import PortableRandom
from itm_lab.scenes.world import Knobs, sample_scene

STREAM = 2**42  # keeps these random numbers apart from those of the dataset
PER_SCENE = 40  # captions that are drawn of one scene


def new_captions(count: int, known: Iterable[str] = ()) -> Iterator[str]:
    """Captions of scenes that nobody draws, the same on every machine; none twice, none of ``known``."""
    knobs, seen, number = Knobs(), set(known), 0
    while count > 0:
        rng = PortableRandom(STREAM, number)
        scene, number = sample_scene(rng, knobs), number + 1
        for _ in range(PER_SCENE):
            caption = sample_caption(rng, scene, knobs, care=rng.below(100))
            if count and caption is not None and caption.text not in seen:
                seen.add(caption.text)
                count -= 1
                yield caption.text

"""Extended judgements of COCO's 5K test split: ECCV Caption and CxC, from the ``eccv_caption`` package."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import numpy as np

from itm_utils.data.precomp import PrecompSplit
from itm_utils.errors import input_error
from itm_utils.matcher import Scores
from itm_utils.metrics.multi_positive import Judged, Judgements, extended_metrics

COCO_SIZE = (5000, 25000)  # images and captions of testall


def coco_ids(split: PrecompSplit) -> tuple[np.ndarray, np.ndarray]:
    """COCO's numbers of the images (5000,) and captions (25000,) of ``testall``.

    Images are named by the public ``testall_ids.txt``, captions by ``testall_capids.txt`` where the folder has it;
    else the k-th caption of an image is taken for its k-th in Karpathy's split, as in the public file.
    """
    path = split.root / f"{split.name}_ids.txt"
    if (split.n_images, split.n_captions) != COCO_SIZE:
        found = f"{split.n_images:,} images and {split.n_captions:,} captions"
        raise input_error(
            f"{split.root}, split {split.name}", found, "COCO's testall: 5,000 images and 25,000 captions"
        )
    if split.ids is None:
        hint = "Copy it from the public COCO package: without it no score can be matched with a judgement."
        raise input_error(path, "no such file", "COCO's image numbers, one a line in the order of the captions", hint)
    captions_of = _captions_of()
    image_ids = _numbers(path, split.ids)
    if sorted(image_ids) != sorted(captions_of):
        strange = next((number for number in image_ids if number not in captions_of), "an image twice")
        raise input_error(path, f"{strange}", "the 5,000 images of Karpathy's test split, once each")
    expected = np.array([captions_of[image] for image in image_ids])
    named = path.with_name(f"{split.name}_capids.txt")
    if not named.is_file():
        return np.array(image_ids), expected.ravel()
    caption_ids = np.array(_numbers(named, named.read_text(encoding="utf-8").split()))
    if caption_ids.shape != (COCO_SIZE[1],) or (np.sort(caption_ids.reshape(-1, 5)) != np.sort(expected)).any():
        raise input_error(
            named, "other numbers", f"COCO's numbers of the captions in {split.name}_caps.txt, one a line"
        )
    return np.array(image_ids), caption_ids


def coco_judgements(kind: str, image_ids: np.ndarray, caption_ids: np.ndarray) -> Judgements:
    """The judgements ``"eccv"`` or ``"cxc"`` for images and captions in the given order."""
    if kind not in ("eccv", "cxc"):
        raise input_error("judgements", kind, "eccv or cxc")
    right = getattr(_package(), f"{kind}_gts")
    images, captions = ({int(number): row for row, number in enumerate(ids)} for ids in (image_ids, caption_ids))
    return Judgements(
        i2t=Judged.of({images[query]: found for query, found in right["i2t"].items()}, captions),
        t2i=Judged.of({captions[query]: found for query, found in right["t2i"].items()}, images),
    )


def coco_extended(scores: Scores, image_ids: np.ndarray, caption_ids: np.ndarray) -> dict[str, float]:
    """ECCV Caption's mAP@R, R-Precision and R@1 and CxC's R@1, 5, 10, both directions, in percent.

    scores: (5000, 25000), rows and columns named by the ids (see :func:`coco_ids`).
    """
    named = {}
    for kind, wanted in {"eccv": ("map_at_r", "r_precision", "r1"), "cxc": ("r1", "r5", "r10")}.items():
        found = extended_metrics(scores, coco_judgements(kind, image_ids, caption_ids))
        named |= {f"{kind}_{side}_{name}": found[f"{side}_{name}"] for side in ("i2t", "t2i") for name in wanted}
    return named


def _numbers(path: Path, lines: list[str]) -> list[int]:
    try:
        return [int(line) for line in lines]
    except ValueError as error:
        raise input_error(path, str(error), "COCO's numbers, one a line") from error


@cache
def _package():
    """The judgements as ``eccv_caption`` carries them: plain JSON lists by COCO's numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says which JSON reader it uses
        from eccv_caption import Metrics
    return Metrics()


def _captions_of() -> dict[int, list[int]]:
    """COCO's image number → numbers of its five captions, in the order of Karpathy's split."""
    owner = _package().coco_gts["t2i"]
    captions: dict[int, list[int]] = {}
    for caption in _package().coco_ids.tolist():
        captions.setdefault(owner[caption][0], []).append(caption)
    return captions

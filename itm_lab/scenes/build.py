"""Write the dataset in the precomputed format and keep it in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from itm_lab.scenes.captions import Caption
from itm_lab.scenes.draw import draw, toy_boxes
from itm_lab.scenes.families import Described, sample_split
from itm_lab.scenes.features import WEIGHTS, RegionNet, load_net, region_features
from itm_lab.scenes.identity import computed_here, source_digest
from itm_lab.scenes.portable_random import PortableRandom
from itm_lab.scenes.proposals import propose
from itm_lab.scenes.world import CANVAS, Knobs
from itm_utils.cache import ensure_folder, write_compact_json
from itm_utils.data.precomp import MADE_FROM
from itm_utils.data.vocabulary import Vocabulary, token_spans
from itm_utils.errors import input_error
from itm_utils.progress import bar

VERSION = 2  # of the generator: raise it when captions, pixels or boxes change
SHIPPED_SEED = 2026
SPLITS = ("train", "dev", "test")
NOT_GENERATING = ("__init__.py", "cache.py", "cli.py", "identity.py", "load.py", "mini_bert.py", "oracle.py", "show.py")
PROPOSAL_STREAM = 2**41  # keeps the proposals' random numbers apart from the families'
MADE_FROM["scenes"] = source_digest


@dataclass(frozen=True)
class ScenesSpec:
    """Everything that decides what is in the dataset. The default is the book's."""

    seed: int = SHIPPED_SEED
    train: int = 3_000
    dev: int = 200
    test: int = 500
    knobs: Knobs = field(default_factory=Knobs)

    def sizes(self) -> dict[str, int]:
        """Images by split."""
        sizes = {split: getattr(self, split) for split in SPLITS}
        for split, size in sizes.items():
            if size < 1:
                raise input_error(f"scenes, split {split}", f"{size} images", "at least 1")
        return sizes

    def text(self) -> str:
        """The spec and the generator's version as one line."""
        return json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True)

    def folder_name(self) -> str:
        """``scenes-`` and a hash of the spec, the frozen weights and the generator's source."""
        digest = hashlib.sha256(self.text().encode())
        for path in (WEIGHTS, *sorted(Path(__file__).parent.glob("*.py"))):
            if path.is_file() and path.name not in NOT_GENERATING:
                digest.update(path.read_bytes())
        return f"scenes-{digest.hexdigest()[:16]}"


def scenes_folder(spec: ScenesSpec | None = None) -> Path:
    """The folder of the dataset, built first if it is missing or damaged."""
    spec = spec or ScenesSpec()
    return ensure_folder(spec.folder_name(), lambda folder: write_dataset(folder, spec))


def write_dataset(folder: Path, spec: ScenesSpec) -> dict[str, Any]:
    """Every file of every split and the vocabulary; returns what the manifest says of them.

    The fingerprint covers the spec, captions, pixels and boxes. It leaves out the features: their last digits
    differ between processors.
    """
    net = load_net()
    content = hashlib.sha256(spec.text().encode())
    captions: list[str] = []
    for number, (split, size) in enumerate(spec.sizes().items()):
        members = sample_split(spec.seed, number, size, spec.knobs)
        lines = [caption.text for member in members for caption in member.captions]
        pixels, boxes = _write_split(folder, split, members, spec, number, net)
        for part in ("\n".join(lines).encode(), pixels.tobytes(), boxes.astype("<i8").tobytes()):
            content.update(part)
        captions += lines if split != "test" else []
    Vocabulary.build(captions).save(folder / "scenes_vocab.json")
    return {"version": VERSION, "spec": asdict(spec), "fingerprint": content.hexdigest()}


def _write_split(
    folder: Path, split: str, members: list[Described], spec: ScenesSpec, number: int, net: RegionNet
) -> tuple[np.ndarray, np.ndarray]:
    """One split; returns its images (n, 96, 96, 3) uint8 and proposals (n, r, 4) int64."""
    count, regions = len(members), spec.knobs.regions
    pixels = np.empty((count, CANVAS, CANVAS, 3), dtype=np.uint8)
    boxes = np.empty((count, regions, 4), dtype=np.int64)
    features = []
    tight = []
    for row, member in enumerate(bar(members, f"scenes: {split}", "image")):
        pixels[row] = draw(member.scene)
        tight.append(toy_boxes(member.scene))
        rng = PortableRandom(spec.seed, number, PROPOSAL_STREAM, row)
        boxes[row] = propose(rng, tight[row], spec.knobs)
        if (row + 1) % 50 == 0 or row + 1 == count:
            start = row - row % 50
            features.append(region_features(net, pixels[start : row + 1], boxes[start : row + 1]))
    np.save(folder / f"{split}_ims.npy", np.concatenate(features))
    np.save(folder / f"{split}_boxes.npy", boxes.astype(np.float32))
    np.save(folder / f"{split}_sizes.npy", np.full((count, 2), CANVAS, dtype=np.int32))
    np.save(folder / f"{split}_pixels.npy", pixels)
    computed_here(folder, split)
    _write_lines(folder / f"{split}_ids.txt", [f"{split}_{row:05d}" for row in range(count)])
    _write_lines(folder / f"{split}_caps.txt", [c.text for member in members for c in member.captions])
    write_compact_json(
        folder / f"{split}_scenes.json", [_scene_record(m, b) for m, b in zip(members, tight, strict=True)]
    )
    grounding = [_caption_record(c, tight[row]) for row, member in enumerate(members) for c in member.captions]
    write_compact_json(folder / f"{split}_grounding.json", grounding)
    return pixels, boxes


def _scene_record(member: Described, boxes: np.ndarray) -> dict[str, Any]:
    return {**member.scene.to_json(), "boxes": boxes.tolist(), "twins": member.twins}


def _caption_record(caption: Caption, boxes: np.ndarray) -> dict[str, Any]:
    """A caption's phrases: characters and words they cover, their toys and boxes, and what they claim."""
    words = token_spans(caption.text)
    phrases = []
    for phrase in caption.phrases:
        inside = [k for k, (start, end) in enumerate(words) if phrase.start <= start and end <= phrase.end]
        phrases.append(
            {
                "text": phrase.text,
                "chars": [phrase.start, phrase.end],
                "tokens": [inside[0], inside[-1] + 1],
                "objects": phrase.toys,
                "boxes": boxes[list(phrase.toys)].tolist(),
                "asks": asdict(phrase.ask),
            }
        )
    return {"phrases": phrases, "relation": caption.claim.relation, "place": caption.claim.place}


def _write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")

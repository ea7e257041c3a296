"""What the attention explorer shows: a few families of Scenes, and what every kept model that attends makes of them.

`itm book explorer` writes to ``book/_static/explorer/``: ``data.js``, the attention of each model and the images. The data
are JSON in scripts, which a page may load from a disk, too.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from itm_lab.photos.word_attention import REGIONS_ATTEND, WORDS_ATTEND, merge_pieces, weights_by_word
from itm_lab.publish.twin_words import WORD, twins_of
from itm_lab.records.kept import KeptModel, kept_records, load_kept
from itm_lab.scenes.draw import draw
from itm_lab.scenes.load import SceneSplit
from itm_lab.scenes.logic import Claim, is_true
from itm_lab.scenes.world import CANVAS, Scene
from itm_utils.boxes import iou
from itm_utils.data.batches import image_batch
from itm_utils.data.precomp import PrecompSplit
from itm_utils.errors import input_error
from itm_utils.files import atomic, write_text
from itm_utils.scoring import Captions, evaluating, score_split

FAMILIES = 5  # at most; each adds a kind of edit that those before it have not
OWN = {"base": 2}  # captions of an image that are shown, by its role; of others one
SCALE = 3  # of the drawings
NAMED = 0.3  # overlap from which on a region is called after a toy
LARGEST = 1_500_000  # bytes of all data
VARIABLE = "attentionExplorer"


@dataclass(frozen=True)
class Text:
    """A caption that is shown. image: of the split. kind, said: what was replaced, and what became what; empty as written.

    of: place of the caption that it was made from, its own place if it is as written.
    """

    text: str
    claim: Claim
    image: int
    of: int
    kind: str = ""
    said: str = ""


def write_explorer(kept: Iterable[KeptModel], data: SceneSplit, split: PrecompSplit, out: Path) -> str:
    """Write the page's data and images; returns one line about them."""
    families = chosen_families(data.scenes)
    images = [image for family in families for image in family]
    texts = list[Text]()
    for family in families:
        texts += texts_of(data, family, len(texts))
    place = {image: number for number, family in enumerate(families) for image in family}
    pairs = [(image, number) for number, text in enumerate(texts) for image in families[place[text.image]]]
    models = [shown for one in kept if (shown := shown_model(one, split, texts, pairs)) is not None]
    if not models:
        raise input_error(out, "no kept model that attends", "at least one", "`itm keep` writes them.")
    attention = [model.pop("attention") for model in models]
    content = {
        "candidates": split.n_images,
        "images": [image_facts(data, split, image) for image in images],
        "captions": [caption_facts(text, data.scenes, images) for text in texts],
        "pairs": [[images.index(image), number] for image, number in pairs],
        "models": models,
    }
    scripts = {"data.js": f"window.{VARIABLE} = {compact(content)};\n"}
    for number, weights in enumerate(attention):  # read when a reader chooses the model
        scripts[f"attention/{number}.js"] = f"window.{VARIABLE}.models[{number}].attention = {compact(weights)};\n"
    if (size := sum(len(text.encode()) for text in scripts.values())) > LARGEST:
        raise input_error(out, f"{size:,} bytes of data", f"at most {LARGEST:,}", "Show fewer families.")
    for folder in ("attention", "images"):
        shutil.rmtree(out / folder, ignore_errors=True)  # of models and images that are shown no longer
    for image in images:
        write_image(out / "images" / f"{image}.jpg", data.scenes[image])
    for name, text in scripts.items():
        write_text(out / name, text)
    return f"{out}: {len(models)} models, {len(images)} images, {len(texts)} captions, {size:,} bytes of data"


def compact(content: Any) -> str:
    """JSON without spaces."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def kept_models(folder: Path) -> list[KeptModel]:
    """Every kept model, in the order of their chapters."""
    found = [load_kept(path.parent.name, path.stem, folder) for path in kept_records(folder)]
    if not found:
        raise input_error(folder, "no kept model", "at least one that attends", "`itm keep` writes them.")
    return found


# ------------------------------------------------------------------------------- what is shown


def chosen_families(scenes: list[Scene]) -> list[list[int]]:
    """Images of the first families that have a base and two edits, each family with a kind of edit that is new."""
    members: dict[int, list[int]] = {}
    for image, scene in enumerate(scenes):
        if scene.role not in ("alone", "retake"):
            members.setdefault(scene.family, []).append(image)
    chosen, seen = [], set[str]()
    for family in members.values():
        ordered = sorted(family, key=lambda image: (scenes[image].role != "base", image))
        roles = [scenes[image].role for image in ordered]
        if roles[0] == "base" and len(roles) > 2 and not seen.issuperset(roles) and len(chosen) < FAMILIES:
            chosen.append(ordered)
            seen |= set(roles)
    return chosen


def texts_of(data: SceneSplit, family: list[int], before: int) -> list[Text]:
    """The captions of a family that are shown, each followed by its twins: those with the most twins come first.

    before: captions of other families.
    """
    scenes, found = [data.scenes[image] for image in family], list[Text]()
    for image, scene in zip(family, scenes, strict=True):
        own = [data.captions[c] for c in np.flatnonzero(data.owner == image)]
        known = [(caption, twins_of(caption, scene, scenes)) for caption in own]
        known.sort(key=lambda one: -sum(any(is_true(twin.claim, other) for other in scenes) for twin in one[1]))
        for caption, twins in known[: OWN.get(scene.role, 1)]:
            of = before + len(found)
            found.append(Text(caption.text, caption.claim, image, of))
            found += [Text(twin.text, twin.claim, image, of, twin.kind, twin.said) for twin in twins]
    return found


def caption_facts(text: Text, scenes: list[Scene], images: list[int]) -> dict[str, Any]:
    """A caption as the page has it. gaps: what stands between its words."""
    ends = [0, *(word.end() for word in WORD.finditer(text.text))]
    starts = [*(word.start() for word in WORD.finditer(text.text)), len(text.text)]
    return {
        "words": WORD.findall(text.text),
        "gaps": [text.text[end:start] for end, start in zip(ends, starts, strict=True)],
        "image": images.index(text.image),
        "of": text.of,
        "kind": text.kind,
        "said": text.said,
        "true": [number for number, image in enumerate(images) if is_true(text.claim, scenes[image])],
    }


def image_facts(data: SceneSplit, split: PrecompSplit, image: int) -> dict[str, Any]:
    """An image as the page has it: file, what it shows in words, and for each region its box and what lies in it."""
    scene, boxes = data.scenes[image], split.region_boxes(np.array([image]))
    if boxes is None:
        raise input_error(split.root, "no boxes", "those of Scenes")
    return {
        "file": f"images/{image}.jpg",
        "role": scene.role,
        "shows": described(scene),
        "boxes": boxes[0].round().astype(int).tolist(),
        "holds": [name_of_region(box, data.boxes[image], scene) for box in boxes[0]],
        "side": CANVAS,
    }


def name_of_region(box: np.ndarray, toys: np.ndarray, scene: Scene) -> str:
    """What a region shows: the toy that it overlaps most, if by enough."""
    overlaps = iou(box[None].astype(float), toys.astype(float))[0]
    best = int(np.argmax(overlaps))
    return toy_words(scene, best) if overlaps[best] >= NAMED else "background"


def toy_words(scene: Scene, number: int) -> str:
    """A toy in words, the plain and the medium-sized left out."""
    toy = scene.toys[number]
    words = (
        toy.size if toy.size != "medium" else "",
        toy.pattern if toy.pattern != "plain" else "",
        toy.colour,
        toy.shape,
    )
    return " ".join(word for word in words if word)


def described(scene: Scene) -> str:
    """All toys of a scene from left to right, and the place, for those who do not see it."""
    order = sorted(range(len(scene.toys)), key=lambda number: scene.toys[number].x)
    return f"{', '.join(toy_words(scene, number) for number in order)}; {scene.place}"


def write_image(path: Path, scene: Scene) -> None:
    """The scene, drawn larger than the models see it."""
    with atomic(path) as temporary:
        Image.fromarray(np.asarray(draw(scene, SCALE))).save(temporary, format="JPEG", quality=85)


# ------------------------------------------------------------------------- what a model makes of it


def shown_model(
    kept: KeptModel, split: PrecompSplit, texts: list[Text], pairs: list[tuple[int, int]]
) -> dict[str, Any] | None:
    """Attention, score and rank of every pair for one model; None for a model without attention of words."""
    said = [text.text for text in texts]
    asked = replace(split, captions=said, owner=np.array([text.image for text in texts]))
    captions = kept.captions(asked)
    attention = pair_attention(kept, split, captions, said, pairs)
    if attention is None:
        return None
    scores = score_split(kept.model, asked, captions).t2i.numpy()
    of_pairs = [scores[image, caption] for image, caption in pairs]
    return {
        "name": kept.record["variant"],
        "chapter": kept.record["chapter"],
        "seed": kept.record["seed"],
        "rsum": round(kept.rsum, 1),
        "weights": kept.record["inputs"]["weights"],
        "scores": [float(f"{score:.4g}") for score in of_pairs],
        "ranks": [
            1 + int(np.sum(np.delete(scores[:, caption], image) >= score))  # ties hurt
            for (image, caption), score in zip(pairs, of_pairs, strict=True)
        ],
        "attention": [
            base64.b64encode(np.round(255 * weights).astype(np.uint8).tobytes()).decode() for weights in attention
        ],
    }


def pair_attention(
    kept: KeptModel, split: PrecompSplit, captions: Captions, said: list[str], pairs: list[tuple[int, int]]
) -> list[np.ndarray] | None:
    """(w, r) of each pair: what every word of a caption gives to the regions of an image."""
    images, numbers = (np.array(side) for side in zip(*pairs, strict=True))
    batch, model = captions.batch(numbers, spans=True), kept.model
    with evaluating(model) as device:
        encoded = model.encode_images(image_batch(split, images).to(device))
        seen = model.attention(encoded, model.encode_texts(batch.to(device)))
    way = WORDS_ATTEND if WORDS_ATTEND in seen else REGIONS_ATTEND
    if way not in seen:
        return None
    found = []
    for row, number in enumerate(numbers):
        weights, spans = weights_by_word(seen[way][row : row + 1], way), batch.spans[row].numpy()
        if len(weights) != len(spans):  # such a model's queries are no words
            return None
        words, merged = merge_pieces(said[number], spans, weights)
        if words != WORD.findall(said[number]):
            raise input_error(kept.path, f"attention of {words}", f"one row for each word of {said[number]!r}")
        found.append(merged)
    return found

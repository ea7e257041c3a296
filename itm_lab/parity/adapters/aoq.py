"""AOQ as its authors published it: what the reference cases of its loss, its lists and its draws hold.

The public code has equation 5 only; ``aoq_variants`` come from a second implementation of the paper. A case holds scores,
embeddings, whole models or lists; :func:`compare_case` tells them apart by their arrays.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_lab.parity.adapters import bfan, vsrn
from itm_lab.parity.comparison import DEVICE, Arrays, Table, batches, our_name, to_device
from itm_utils.data.precomp import open_split
from itm_utils.matcher import ImageBatch, Images, Matcher, OfflineNegatives, PairBatch, Scores, TextBatch, Texts
from itm_utils.mining import OfflineLists, draw_offline, mine
from itm_utils.models.aoq import (
    AnchorScores,
    LossConfig,
    OfflineLoss,
    OfflineScores,
    adaptive_weight,
    encode_with_offline,
    gather_scores,
    hardest_negatives,
    hinge,
    offline_loss,
    offline_scores,
    online_scores,
    select_pairs,
)
from itm_utils.models.vsepp import GlobalEmbeddingMixin
from itm_utils.scoring import trim

About = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
OFFLINE = ("s_i_toff", "s_ioff_t", "s_ioff_toff", "s_i2_t2")  # as the fields of OfflineScores
CONSTANTS = {
    "gamma1_online": "margin",
    "gamma2_offline": "offline_margin",
    "marginonline": "margin",
    "marginoffline": "offline_margin",
    "alpha": "alpha",
    "beta": "beta",
}
VARIANTS = {
    "OnlineTriplet": {"kind": "online"},
    "WithoutOfflineAdap": {"weigh_by": "positive"},
    "detached": {"detach": True},
    "clamped": {"clamp": True},
    "squared": {"squared": True},
}


def compare_case(table: Table, about: About, arrays: Arrays) -> bool:
    """Compare one case, of whichever kind it is."""
    if "in.S" in arrays:
        names = ("S", *OFFLINE)
        scores = {name: to_device(arrays[f"in.{name}"]).requires_grad_() for name in names}
        compare_losses(table, about, arrays, scores, scores)
        compare_terms(table, about, arrays, scores)
        if "in.image_id" in arrays:
            compare_hardest(table, about, arrays)
    elif "in.im" in arrays:
        compare_embeddings(table, about, arrays)
    elif "in.images" in arrays:
        compare_model(table, about, arrays)
    elif "in.draw_n" in arrays:
        compare_draws(table, arrays)
    else:
        compare_lists(table, about, arrays)
    return True


def loss_config(options: About, name: str) -> LossConfig:
    """The loss that a case calls ``name``, such as ``AdapOffQuin.squared``."""
    settings = {ours: options[public] for public, ours in CONSTANTS.items() if public in options}
    for part in name.split("."):
        settings |= VARIANTS.get(part, {"kind": part})
    return LossConfig(**settings)


def positive_pairs(options: About, arrays: Arrays, size: int) -> Tensor:
    """(b, b): positives of a case, by image ids or the diagonal alone."""
    ids = (
        to_device(arrays["in.image_id"])
        if options.get("mask") == "image_id"
        else torch.arange(size, device=DEVICE.get())
    )
    return ids[:, None] == ids


def anchors_of(
    config: LossConfig, options: About, arrays: Arrays, tensors: Tensors
) -> tuple[AnchorScores, AnchorScores]:
    """Both directions from the scores of a case."""
    scores = Scores.same(tensors["S"])
    offline = OfflineScores(*(tensors[name] for name in OFFLINE))
    return gather_scores(scores, positive_pairs(options, arrays, len(scores)), offline, config)


def compare_losses(table: Table, about: About, arrays: Arrays, leaves: Tensors, tensors: Tensors) -> None:
    """Compare every loss that a case holds, and its gradients in ``leaves``."""
    options = about.get("options", about)
    for key in [key for key in arrays if key.startswith("out.") and "grad." not in key]:
        config = loss_config(options, key.removeprefix("out.").removeprefix("official.").removeprefix("paper."))
        loss = offline_loss(anchors_of(config, options, arrays, tensors), config)
        table.add("losses", key, loss, arrays[key], relative=True)
        gradients = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, materialize_grads=True)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            place = f"{key}.grad.{leaf}" if f"{key}.grad.{leaf}" in arrays else f"out.grad.{leaf}"
            table.add("gradients", place, gradient, arrays[place], relative=True)


def compare_terms(table: Table, about: About, arrays: Arrays, tensors: Tensors) -> None:
    """Compare the hinges and weights of equation 5."""
    options = about.get("options", about)
    config = loss_config(options, "AdapOffQuin")
    found = {}
    directions = zip(("i2t", "t2i"), ("ioff_toff", "i2_t2"), anchors_of(config, options, arrays, tensors), strict=True)
    for direction, derived, anchors in directions:
        found |= {
            f"mid.online_{direction}": hinge(anchors.positive, anchors.online, config.margin, False),
            f"mid.weight_{direction}": adaptive_weight(anchors, config),
            f"mid.off_{direction}": hinge(anchors.positive, anchors.offline, config.offline_margin, False),
            f"mid.derived_{derived}": hinge(anchors.positive, anchors.derived, config.offline_margin, False),
        }
    add_known(table, found, arrays)


def compare_hardest(table: Table, about: About, arrays: Arrays) -> None:
    """Compare the hardest negatives, and which derived pairs of a batch are skipped as positives."""
    scores = Scores.same(to_device(arrays["in.S"]))
    positive = positive_pairs(about["options"], arrays, len(scores))
    captions, images = hardest_negatives(scores, positive)

    def score_pairs(rows: Tensor, columns: Tensor) -> Scores:
        return select_pairs(scores, rows, columns)

    anchors, _ = online_scores(score_pairs, (captions, images), positive, derived=True)
    found = {
        "mid.online_text_index": captions,
        "mid.online_image_index": images,
        "mid.onlinequin_skipped": (anchors.derived == -math.inf).long(),
    }
    for name, value in found.items():
        table.add("values", name, value, arrays[name])


def compare_embeddings(table: Table, about: About, arrays: Arrays) -> None:
    """Compare scores, loss and gradients from unit vectors of images (im) and captions (s)."""
    names = [f"{side}{which}" for side in ("im", "s") for which in ("", "_off", "_off2")]
    leaves = {name: to_device(arrays[f"in.{name}"]).requires_grad_() for name in names}
    pairs = (("im", "s_off"), ("im_off", "s"), ("im_off", "s_off"), ("im_off2", "s_off2"))
    scores = {"S": leaves["im"] @ leaves["s"].T}
    for name, (image, caption) in zip(OFFLINE, pairs, strict=True):
        scores[name] = (leaves[image] * leaves[caption]).sum(dim=1)
    for name, value in scores.items():
        table.add("values", f"mid.{name}", value, arrays[f"mid.{name}"])
    compare_losses(table, about, arrays, leaves, scores)


def compare_model(table: Table, about: About, arrays: Arrays) -> None:
    """Compare a public model under this loss, in evaluation and in training mode."""
    weights = {name[2:]: to_device(value) for name, value in arrays.items() if name.startswith("w.")}
    adapter = bfan if "focal_type" in about["options"] else vsrn
    model = adapter.load(weights, about["options"]).eval()
    config = loss_config(about["options"], "AdapOffQuin")
    objective = OfflineLoss(config, by_image=about["options"].get("mask") == "image_id")
    batch = pair_batch(arrays)
    images, texts = encode_with_offline(model, batch, config)
    offline = offline_scores(model, images, texts, len(batch), config)
    images, texts = images[: len(batch)], trim(texts[: len(batch)])
    scores = model.score(images, texts).i2t
    found = {"mid.S": scores, "out.sims": scores, "mid.img_emb": images.local, "mid.words": texts.local}
    found |= {f"mid.{name}": value for name, value in zip(OFFLINE, offline or (), strict=True)}
    add_known(table, found, arrays)
    compare_step(table, model, adapter.NAMES, objective, arrays, "out.")
    if "out.train.AdapOffQuin" in arrays:
        compare_step(table, model.train(), adapter.NAMES, objective, arrays, "out.train.")


def pair_batch(arrays: Arrays) -> PairBatch:
    """Positive pairs and both sets of offline negatives of a case."""

    def part(suffix: str) -> PairBatch:
        names = ("in.images", "in.tokens", "in.lengths")
        return PairBatch(*batches({name: arrays[name + suffix] for name in names}))

    return replace(part(""), offline=OfflineNegatives(first=part("_off"), second=part("_off2")))


def compare_step(
    table: Table, model: Matcher, names: Mapping[str, str], objective: OfflineLoss, arrays: Arrays, prefix: str
) -> None:
    """Call the objective once and compare its value, the gradients and the buffers of batch norms."""
    model.zero_grad()
    loss, _ = objective(model, pair_batch(arrays))
    loss.backward()
    table.add("losses", f"{prefix}AdapOffQuin", loss, arrays[f"{prefix}AdapOffQuin"], relative=True)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for key in arrays:
        if key.startswith(f"{prefix}grad."):
            gradient = parameters[our_name(names, key.removeprefix(f"{prefix}grad."))].grad
            table.add("gradients", key, gradient, arrays[key], relative=True)
        elif key.startswith(f"{prefix}buffer."):
            table.add("values", key, buffers[our_name(names, key.removeprefix(f"{prefix}buffer."))], arrays[key])


def compare_draws(table: Table, arrays: Arrays) -> None:
    """Compare offline negatives that are drawn from given lists with the random numbers of the public code."""
    lists = OfflineLists(arrays["in.i2t_top"], arrays["in.t2i_top"], {})
    owner = np.repeat(np.arange(len(lists.texts)), 5)
    generator: Any = RecordedDraws(arrays["in.draw_n"], arrays["in.draw_n2"])
    drawn = draw_offline(lists, owner, arrays["in.caption_index"], generator, "tied")
    names = ("t_off", "i_off", "i2", "t2", "ioff_matches_toff")
    found = dict(zip(names, (*drawn, (drawn.images == drawn.text_images).astype(int)), strict=True))
    for name, value in found.items():
        table.add("values", f"out.{name}", value, arrays[f"out.{name}"])


def compare_lists(table: Table, about: About, arrays: Arrays) -> None:
    """Compare lists that are mined from given embeddings."""
    captions: Any = GivenCaptions(arrays["in.cap_embs"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "train_ims.npy", arrays["in.img_embs"][:, None])
        (folder / "train_caps.txt").write_text("a caption\n" * len(captions.lengths), encoding="utf-8")
        lengths = about["h_text"], about["h_image"]
        lists = mine(GivenEmbeddings(), open_split(folder, "train"), captions, folder / "lists", *lengths)
        found = {"out.i2t_top": np.array(lists.texts), "out.t2i_top": np.array(lists.images)}
    for name, value in found.items():
        table.add("values", name, value, arrays[name])


def add_known(table: Table, found: Mapping[str, Any], arrays: Arrays) -> None:
    """Compare those values that a case has."""
    for name, value in found.items():
        if name in arrays:
            table.add("values", name, value, arrays[name])


class GivenEmbeddings(GlobalEmbeddingMixin, Matcher):
    """A matcher whose embeddings are its inputs."""

    def encode_images(self, batch: ImageBatch) -> Images:
        return Images(pooled=batch.regions[:, 0])

    def encode_texts(self, batch: TextBatch) -> Texts:
        return Texts(pooled=batch.features[:, 0])


class GivenCaptions:
    """Captions of one token each, whose states are given vectors (c, d)."""

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = torch.from_numpy(vectors)[:, None]
        self.lengths = np.ones(len(vectors), dtype=np.int64)

    def batch(self, captions: np.ndarray) -> TextBatch:
        index = torch.from_numpy(np.asarray(captions, dtype=np.int64))
        return TextBatch(torch.ones_like(index), index, features=self.vectors[index])


class RecordedDraws:
    """A random generator that returns given draws."""

    def __init__(self, *draws: np.ndarray) -> None:
        self.draws = list(draws)

    def integers(self, high: int | np.ndarray, size: int | None = None) -> np.ndarray:
        return self.draws.pop(0)

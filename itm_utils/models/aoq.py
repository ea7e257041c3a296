# Generated from notebooks/10_aoq.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/10_aoq.ipynb exports."""

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from itm_lab.parity.comparison import Table, batches, our_name
from torch import Tensor

from itm_utils.data.precomp import open_split
from itm_utils.errors import input_error
from itm_utils.matcher import (
    ImageBatch,
    Images,
    Matcher,
    OfflineNegatives,
    PairBatch,
    Scores,
    TextBatch,
    Texts,
)
from itm_utils.metrics import retrieval_ranks, score_matrix
from itm_utils.mining import OfflineLists, draw_offline, mine
from itm_utils.models import bfan, scan, vsrn
from itm_utils.models.bfan import BFAN
from itm_utils.models.mmca import HardNegativeTripletLoss, score_selected
from itm_utils.models.vsepp import GlobalEmbeddingMixin, HingeTriplet
from itm_utils.models.vsrn import VSRN
from itm_utils.scoring import score_all


# cell luck
def expected_rank(candidates: int, batch: int) -> float:
    """Mean rank, among all wrong candidates, of the hardest of ``batch - 1`` random ones."""
    return (candidates + 1) / batch


def chance_of_top(candidates: int, batch: int, top: int = 100) -> float:
    """How likely it is that one of ``batch - 1`` random ones is among the ``top`` hardest."""
    return 1 - (1 - top / candidates) ** (batch - 1)


def online_ranks(
    scores: np.ndarray, wrong: np.ndarray, batch: int, seed: int = 0, turns: int = 1
) -> np.ndarray:
    """(a * turns,): rank, counted from 1, of the hardest of ``batch - 1`` wrong candidates.

    scores: (a, n) of anchors with candidates. wrong: (a, n), which ones are wrong.
    turns: random batches that each anchor meets.
    """
    generator = np.random.default_rng(seed)
    ranks = []
    for row, allowed in zip(scores, wrong, strict=True):
        row = row[allowed]
        for _ in range(turns):
            drawn = generator.choice(len(row), min(batch - 1, len(row)), replace=False)
            ranks.append(1 + np.count_nonzero(row > row[drawn].max()))
    return np.array(ranks)


# cell line
class Line(NamedTuple):
    """Scores (b,) that one line of the loss compares: of the right pair and of wrong ones.

    online: with the hardest of the batch; minus infinity where the batch has no wrong one.
    offline: with one from the list. derived: of a wrong pair without the anchor in it.
    """

    positive: Tensor
    online: Tensor
    offline: Tensor | None = None
    derived: Tensor | None = None


# cell switches
KINDS = ("online", "OffTri", "OffQuin", "AdapOffQuin", "OnlyOffline", "OnlineQuin")
WEIGHED_BY = ("offline", "positive")


@dataclass(eq=False)
class LossConfig:
    """The losses of this chapter; the defaults are equation 5 with the paper's constants.

    kind: which terms count. weigh_by: whose score the online one is compared with in the
    weight. detach: no gradient through the weight. clamp: no weight below zero. squared:
    every hinge times itself.
    """

    kind: str = "AdapOffQuin"
    margin: float = 0.2
    offline_margin: float = 0.0
    alpha: float = 0.3
    beta: float = 1.5
    weigh_by: str = "offline"
    detach: bool = False
    clamp: bool = False
    squared: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("kind", KINDS), ("weigh_by", WEIGHED_BY)):
            if (found := getattr(self, name)) not in allowed:
                raise input_error(name, repr(found), f"one of {', '.join(allowed)}")
        if self.alpha <= 0:
            raise input_error("alpha", repr(self.alpha), "a number above 0")

    @property
    def has_offline(self) -> bool:
        return self.kind != "online"

    @property
    def has_derived(self) -> bool:
        return self.kind not in ("online", "OffTri")


# cell penalty
class Penalty(LossConfig):
    """What a line costs."""

    def hinge(self, margin: float, line: Line, wrong: Tensor) -> Tensor:
        """By how much a wrong score (b,) comes too near to the right one, or its square."""
        short = (margin - line.positive + wrong).relu()
        return short.square() if self.squared else short

    def weight(self, line: Line) -> Tensor:
        """What the online hinge of each pair counts: (b,)."""
        if self.kind != "AdapOffQuin":
            return torch.ones_like(line.positive)
        rival = line.offline if self.weigh_by == "offline" else line.positive
        online = line.online.masked_fill(line.online == -math.inf, 0)
        weight = self.beta - (rival - online) / self.alpha
        weight = weight.clamp(min=0) if self.clamp else weight
        return weight.detach() if self.detach else weight

    def cost(self, line: Line) -> Tensor:
        """(b,): the terms of a line, added."""
        total = torch.zeros_like(line.positive)
        if self.kind != "OnlyOffline":
            hinge = self.hinge(self.margin, line, line.online)
            total = total + self.weight(line) * hinge
        if self.has_offline:
            total = total + self.hinge(self.offline_margin, line, line.offline)
        if self.has_derived:
            total = total + self.hinge(self.offline_margin, line, line.derived)
        return total


# cell equation-6
def equation_6(line: Line, switches: LossConfig) -> Line:
    """Slopes of equation 5 in the four scores of a line, as the paper derives them."""
    gamma, alpha = switches.margin, switches.alpha
    positive, online, offline, derived = line
    on = (gamma - positive + online > 0).to(positive.dtype)
    off = (switches.offline_margin - positive + offline > 0).to(positive.dtype)
    far = (switches.offline_margin - positive + derived > 0).to(positive.dtype)
    return Line(
        positive=((offline - online) / alpha - switches.beta) * on - off - far,
        online=((2 * online - positive - offline + gamma) / alpha + switches.beta) * on,
        offline=(positive - online - gamma) / alpha * on + off,
        derived=far,
    )


# cell hardest
class Ask(Protocol):
    """Scores (p,) of images ``rows`` with captions ``columns``, with gradients."""

    def __call__(self, rows: Tensor, columns: Tensor) -> Scores: ...


def hardest(scores: Scores, same: Tensor) -> tuple[Tensor, Tensor]:
    """Hardest wrong caption of each image, hardest wrong image of each caption: (b,) each.

    same: (b, b), True where image and caption belong together.
    """
    captions = scores.i2t.masked_fill(same, -math.inf).argmax(dim=1)
    images = scores.t2i.masked_fill(same, -math.inf).argmax(dim=0)
    return captions, images


def online_lines(
    ask: Ask, picks: tuple[Tensor, Tensor], same: Tensor, derived: bool
) -> tuple[Line, Line]:
    """The line of the images and the line of the captions, of a batch alone.

    derived: also the hardest image with the hardest caption, and their partners.
    """
    captions, images = picks
    right = torch.arange(len(same), device=same.device)
    rows, columns = [right, right, images], [right, captions, right]
    if derived:
        rows, columns = [*rows, images, captions], [*columns, captions, images]
    found = ask(torch.cat(rows), torch.cat(columns))
    i2t, t2i = found.i2t.split(len(same)), found.t2i.split(len(same))
    alone = same.all(dim=1)  # nobody wrong in the batch
    first = Line(i2t[0], i2t[1].masked_fill(alone, -math.inf))
    second = Line(t2i[0], t2i[2].masked_fill(alone, -math.inf))
    if derived:
        true = same[images, captions]  # they belong together: nothing to learn
        first = first._replace(derived=i2t[3].masked_fill(true, -math.inf))
        second = second._replace(derived=t2i[4].masked_fill(true, -math.inf))
    return first, second


# cell lines
class OfflineScores(NamedTuple):
    """Scores (b,) of the pairs from the lists, each in the direction of its line."""

    caption: Tensor  # the image with its offline caption, i2t
    image: Tensor  # the caption with its offline image, t2i
    first: Tensor | None = None  # offline image with offline caption, i2t
    second: Tensor | None = None  # owner of the one with a caption of the other, t2i


def asked_of(scores: Scores) -> Ask:
    """Answers from matrices that are already there."""
    return lambda rows, columns: Scores(
        scores.i2t[rows, columns], scores.t2i[rows, columns]
    )


class ScoreLoss(Penalty):
    """From scores of a batch to its loss."""

    def lines(
        self, ask: Ask, scores: Scores, same: Tensor, offline: OfflineScores | None
    ) -> tuple[Line, Line]:
        """Both lines. scores: (b, b), only to find the hardest; ask: gives what counts."""
        from_batch = self.kind == "OnlineQuin"
        first, second = online_lines(ask, hardest(scores, same), same, from_batch)
        if not self.has_offline:
            return first, second
        first = first._replace(offline=offline.caption)
        second = second._replace(offline=offline.image)
        if self.has_derived and not from_batch:
            first = first._replace(derived=offline.first)
            second = second._replace(derived=offline.second)
        return first, second

    def of_scores(
        self, scores: Scores, same: Tensor, offline: OfflineScores | None = None
    ) -> Tensor:
        """The loss of a batch from all its scores (b, b); a sum, not a mean."""
        first, second = self.lines(asked_of(scores), scores, same, offline)
        return self.cost(first).sum() + self.cost(second).sum()


# cell encode
def encode(model: Matcher, batch: PairBatch) -> tuple[Images, Texts]:
    """Both sides of some pairs through the encoders."""
    return model.encode_images(batch.images), model.encode_texts(batch.texts)


# cell offline-loss
class MatcherLoss(ScoreLoss):
    """From a matcher and a batch to scores. budget: see ``OfflineLoss``."""

    budget = 0

    def asked(self, model: Matcher, images: Images, texts: Texts) -> tuple[Ask, Scores]:
        """How to get scores with gradients, and all scores of the batch (b, b)."""
        if not self.budget:
            scores = model.score(images, texts)
            return asked_of(scores), scores
        device = next(model.parameters()).device
        scores = score_all(model, images, texts, self.budget, False, device)
        return partial(score_selected, model, images, texts, budget=self.budget), scores

    def given(self, model: Matcher, images: Images, texts: Texts) -> Scores:
        """Scores (b,) with gradients of image b with caption b."""
        if not self.budget:
            return model.score_pairs(images, texts)
        each = torch.arange(len(images), device=next(model.parameters()).device)
        return score_selected(model, images, texts, each, each, self.budget)

    def offline(
        self, model: Matcher, images: Images, texts: Texts, batch: PairBatch
    ) -> OfflineScores | None:
        """Scores of the pairs from the lists; the encoders run again for each set of them."""
        if not self.has_offline:
            return None
        if batch.offline is None:
            hint = "Train on itm_utils.data.batches.OfflinePairs."
            raise input_error(
                self.kind, "a batch without offline pairs", "one with", hint
            )
        other_images, other_texts = encode(model, batch.offline.first)
        caption = self.given(model, images, other_texts).i2t
        image = self.given(model, other_images, texts).t2i
        if not self.has_derived or self.kind == "OnlineQuin":
            return OfflineScores(caption, image)
        first = self.given(model, other_images, other_texts).i2t
        second = self.given(model, *encode(model, batch.offline.second)).t2i
        return OfflineScores(caption, image, first, second)


# cell described
def described(lines: tuple[Line, Line], penalty: Penalty) -> dict[str, float]:
    """Numbers for the log: mean scores of a batch, and how its weights stand."""
    parts = zip(*lines, strict=True)
    both = Line(*(None if part[0] is None else torch.cat(part) for part in parts))
    there = both.online > -math.inf
    numbers = {"positive": both.positive.mean()}
    total = torch.where(there, both.online, 0).sum()
    numbers["online"] = total / there.sum().clamp(min=1)
    if both.offline is not None:
        numbers["offline"] = both.offline.mean()
    if penalty.kind == "AdapOffQuin":
        weight = penalty.weight(both)
        counts = penalty.hinge(penalty.margin, both, both.online) > 0
        numbers["weight"] = weight.mean()
        numbers["negative"] = (weight < 0).float().mean()
        numbers["rewarded"] = ((weight < 0) & counts).float().mean()
    values = torch.stack([value.detach().float() for value in numbers.values()])
    return dict(zip(numbers, values.tolist(), strict=True))


# cell objective
@dataclass(eq=False)
class OfflineLoss(MatcherLoss):
    """The objective: online negatives from the batch, offline ones from lists.

    by_image: captions of one picture are never wrong for it; else the pair alone is left
    out. warmup_epochs: over all wrong pairs, without lists. budget: 0; or bytes, where
    pairs are dear and few of them (``negatives`` in warm-up) are picked, as in chapter 08.
    """

    by_image: bool = True
    warmup_epochs: int = 0
    negatives: int = 4
    budget: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._warmup = HingeTriplet(self.margin, hardest=False)
        if self.budget:
            picked = {"negatives": self.negatives, "budget": self.budget}
            self._warmup = HardNegativeTripletLoss(self.margin, hardest=False, **picked)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """The training loop calls this at the start of each epoch, counted from 0."""
        self.hardest_now = epoch >= self.warmup_epochs

    def same(self, batch: PairBatch) -> Tensor:
        """(b, b): True where image and caption belong together."""
        ids = batch.images.ids
        ids = ids if self.by_image else torch.arange(len(ids), device=ids.device)
        return ids[:, None] == ids

    def __call__(
        self, model: Matcher, batch: PairBatch
    ) -> tuple[Tensor, dict[str, float]]:
        if not self.hardest_now:
            return self._warmup(model, batch)
        images, texts = encode(model, batch)
        ask, scores = self.asked(model, images, texts)
        offline = self.offline(model, images, texts, batch)
        lines = self.lines(ask, scores, self.same(batch), offline)
        loss = sum(self.cost(line).sum() for line in lines)
        own = model.extra_losses(images, texts, batch)
        return loss + sum(own.values()), {"hardest": 1.0} | described(lines, self)


# cell compare-scores
INPUTS = ("S", "s_i_toff", "s_ioff_t", "s_ioff_toff", "s_i2_t2")
CONSTANTS = {
    "gamma1_online": "margin",
    "gamma2_offline": "offline_margin",
    "marginonline": "margin",
    "marginoffline": "offline_margin",
    "alpha": "alpha",
    "beta": "beta",
}
GIVEN_NAMES = {
    "OnlineTriplet": {"kind": "online"},
    "WithoutOfflineAdap": {"weigh_by": "positive"},
    "detached": {"detach": True},
    "clamped": {"clamp": True},
    "squared": {"squared": True},
}


def given_loss(options: Mapping[str, Any], name: str) -> OfflineLoss:
    """The loss that a golden case calls ``name``, such as ``AdapOffQuin.squared``."""
    settings = {o: options[given] for given, o in CONSTANTS.items() if given in options}
    for part in name.split("."):
        settings |= GIVEN_NAMES.get(part, {"kind": part})
    return OfflineLoss(**settings, by_image=options.get("mask") == "image_id")


def given_lines(
    loss: OfflineLoss, arrays: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Line, Line]:
    """Both lines from the scores of a golden case."""
    scores = Scores.same(tensors["S"])
    ids = torch.arange(len(scores.i2t))
    if loss.by_image:
        ids = torch.from_numpy(arrays["in.image_id"])
    offline = OfflineScores(*(tensors[name] for name in INPUTS[1:]))
    return loss.lines(asked_of(scores), scores, ids[:, None] == ids, offline)


# cell compare-slopes
def compare_losses(
    table: Table,
    about: Mapping[str, Any],
    arrays: Mapping[str, Any],
    leaves: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
) -> None:
    """Every loss that a case holds, and its gradients in ``leaves``."""
    options = about.get("options", about)
    names = [key for key in arrays if key.startswith("out.") and "grad." not in key]
    for key in names:
        name = key.removeprefix("out.").removeprefix("official.").removeprefix("paper.")
        loss = given_loss(options, name)
        lines = given_lines(loss, arrays, tensors)
        value = sum(loss.cost(line).sum() for line in lines)
        table.add("losses", key, value, arrays[key], relative=True)
        found = torch.autograd.grad(
            value, list(leaves.values()), retain_graph=True, materialize_grads=True
        )
        for leaf, slope in zip(leaves, found, strict=True):
            place = f"{key}.grad.{leaf}" if f"{key}.grad.{leaf}" in arrays else ""
            place = place or f"out.grad.{leaf}"
            table.add("gradients", place, slope, arrays[place], relative=True)


def compare_middle(
    table: Table, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> None:
    """Hinges, weights and picks on the way to equation 5."""
    tensors = {name: torch.from_numpy(arrays[f"in.{name}"]) for name in INPUTS}
    loss = given_loss(about.get("options", about), "AdapOffQuin")
    values = {}
    for way, line in zip(
        ("i2t", "t2i"), given_lines(loss, arrays, tensors), strict=True
    ):
        values[f"mid.online_{way}"] = loss.hinge(loss.margin, line, line.online)
        values[f"mid.weight_{way}"] = loss.weight(line)
        values[f"mid.off_{way}"] = loss.hinge(loss.offline_margin, line, line.offline)
        pair = {"i2t": "ioff_toff", "t2i": "i2_t2"}[way]
        derived = loss.hinge(loss.offline_margin, line, line.derived)
        values[f"mid.derived_{pair}"] = derived
    for name, value in values.items():
        if name in arrays:
            table.add("values", name, value, arrays[name])


# cell compare-picks
def compare_picks(
    table: Table, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> None:
    """Who is hardest, and which derived pairs of a batch are skipped for being true."""
    scores = Scores.same(torch.from_numpy(arrays["in.S"]))
    ids = torch.from_numpy(arrays["in.image_id"])
    if about["options"]["mask"] != "image_id":
        ids = torch.arange(len(ids))
    same = ids[:, None] == ids
    captions, images = hardest(scores, same)
    line, _ = online_lines(asked_of(scores), (captions, images), same, derived=True)
    values = {
        "mid.online_text_index": captions,
        "mid.online_image_index": images,
        "mid.onlinequin_skipped": (line.derived == -math.inf).long(),
    }
    for name, value in values.items():
        table.add("values", name, value, arrays[name])


def compare_vectors(
    table: Table, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> None:
    """From unit vectors of images (im) and captions (s) to the loss and back."""
    names = [
        f"{side}{which}" for side in ("im", "s") for which in ("", "_off", "_off2")
    ]
    leaves = {n: torch.from_numpy(arrays[f"in.{n}"]).requires_grad_() for n in names}
    pairs = {"s_i_toff": ("im", "s_off"), "s_ioff_t": ("im_off", "s")}
    pairs |= {"s_ioff_toff": ("im_off", "s_off"), "s_i2_t2": ("im_off2", "s_off2")}
    tensors = {"S": leaves["im"] @ leaves["s"].T}
    for name, (image, text) in pairs.items():
        tensors[name] = (leaves[image] * leaves[text]).sum(dim=1)
    for name, value in tensors.items():
        table.add("values", f"mid.{name}", value, arrays[f"mid.{name}"])
    compare_losses(table, about, arrays, leaves, tensors)


# cell compare-model
def given_batch(arrays: Mapping[str, Any]) -> PairBatch:
    """Right pairs and both sets of offline pairs of a golden case."""

    def part(suffix: str) -> PairBatch:
        names = ("in.images", "in.tokens", "in.lengths")
        return PairBatch(*batches({name: arrays[name + suffix] for name in names}))

    offline = OfflineNegatives(first=part("_off"), second=part("_off2"))
    return replace(part(""), offline=offline)


def compare_step(
    table: Table, model: Matcher, loss: OfflineLoss, arrays: Mapping, prefix: str
) -> None:
    """The objective called once: its value, gradients, and what a batch norm remembers."""
    model.zero_grad()
    value, _ = loss(model, given_batch(arrays))
    value.backward()
    key = f"{prefix}AdapOffQuin"
    table.add("losses", key, value, arrays[key], relative=True)
    slopes = {name: weight.grad for name, weight in model.named_parameters()}
    kept = dict(model.named_buffers())
    for key in arrays:
        if key.startswith(f"{prefix}grad."):
            name = our_name(type(model), key.removeprefix(f"{prefix}grad."))
            table.add("gradients", key, slopes[name], arrays[key], relative=True)
        elif key.startswith(f"{prefix}buffer."):
            name = our_name(type(model), key.removeprefix(f"{prefix}buffer."))
            table.add("values", key, kept[name], arrays[key])


# cell compare-lists
class GivenVectors(GlobalEmbeddingMixin, Matcher):
    """A matcher of a golden case whose vectors are already there."""

    def encode_images(self, batch: ImageBatch) -> Images:
        return Images(pooled=batch.regions[:, 0])

    def encode_texts(self, batch: TextBatch) -> Texts:
        return Texts(pooled=batch.features[:, 0])


class GivenCaptions:
    """Captions of one token each, with vectors (c, d) for states."""

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = torch.from_numpy(vectors)[:, None]
        self.lengths = np.ones(len(vectors), dtype=np.int64)

    def batch(self, captions: np.ndarray) -> TextBatch:
        where = torch.from_numpy(np.asarray(captions, dtype=np.int64))
        return TextBatch(torch.ones_like(where), where, features=self.vectors[where])


class Replay:
    """A generator whose draws are given."""

    def __init__(self, *draws: np.ndarray) -> None:
        self.draws = list(draws)

    def integers(self, high: int | np.ndarray, size: int | None = None) -> np.ndarray:
        return self.draws.pop(0)


# cell compare-mining
def compare_lists(
    table: Table, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> None:
    """Mined lists from given vectors, or draws from given lists with given numbers."""
    if "in.draw_n" in arrays:
        lists = OfflineLists(arrays["in.i2t_top"], arrays["in.t2i_top"], {})
        owner = np.repeat(np.arange(len(lists.texts)), 5)
        draws = Replay(arrays["in.draw_n"], arrays["in.draw_n2"])
        found = draw_offline(lists, owner, arrays["in.caption_index"], draws, "tied")
        names = ("out.t_off", "out.i_off", "out.i2", "out.t2")
        values = dict(zip(names, found, strict=True))
        values["out.ioff_matches_toff"] = (found.images == found.text_images).astype(
            int
        )
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            np.save(folder / "train_ims.npy", arrays["in.img_embs"][:, None])
            captions = GivenCaptions(arrays["in.cap_embs"])
            lines = "a caption\n" * len(captions.lengths)
            (folder / "train_caps.txt").write_text(lines, encoding="utf-8")
            split, lengths = (
                open_split(folder, "train"),
                (about["h_text"], about["h_image"]),
            )
            lists = mine(GivenVectors(), split, captions, folder / "lists", *lengths)
            values = {"out.i2t_top": np.array(lists.texts)}
            values["out.t2i_top"] = np.array(lists.images)
    for name, value in values.items():
        table.add("values", name, value, arrays[name])


# cell compare-host
def compare_host(
    table: Table, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> None:
    """A whole public model under this loss, in both modes."""
    weights = {k[2:]: torch.from_numpy(v) for k, v in arrays.items() if k[:2] == "w."}
    base_model = BFAN if "focal_type" in about["options"] else VSRN
    model = base_model.from_public(weights, about["options"]).eval()
    loss = given_loss(about["options"], "AdapOffQuin")
    batch = given_batch(arrays)
    images, texts = encode(model, batch)
    offline = loss.offline(model, images, texts, batch)
    scores = model.score(images, texts).i2t
    values = {"mid.S": scores, "out.sims": scores}
    values |= {"mid.img_emb": images.local, "mid.words": texts.local}
    names = (f"mid.{name}" for name in INPUTS[1:])
    values |= dict(zip(names, offline, strict=True))
    for name, value in values.items():
        if name in arrays:
            table.add("values", name, value, arrays[name])
    compare_step(table, model, loss, arrays, "out.")
    if "out.train.AdapOffQuin" in arrays:
        compare_step(table, model.train(), loss, arrays, "out.train.")


def compare_case(
    table: Table, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> bool:
    """One golden case, of whichever kind it is."""
    if "in.S" in arrays:
        tensors = {
            n: torch.from_numpy(arrays[f"in.{n}"]).requires_grad_() for n in INPUTS
        }
        compare_losses(table, about, arrays, tensors, tensors)
        compare_middle(table, about, arrays)
        if "in.image_id" in arrays:
            compare_picks(table, about, arrays)
    elif "in.im" in arrays:
        compare_vectors(table, about, arrays)
    elif "in.images" in arrays:
        compare_host(table, about, arrays)
    else:
        compare_lists(table, about, arrays)
    return True


# cell build
BASE_MODELS = {"vsrn": vsrn.build, "scan": scan.build, "bfan": bfan.build}
MINERS = ("vsrn", "self")
STARTS = ("scratch", "fine-tune")
FIXED = {  # the same in every run: of VSRN's caption writer, of SCAN, of BFAN
    "caption_dropout": 0.2,
    "max_len": 60,
    "first_norm": "clipped_l2norm",
    "pooling": "Mean",
    "lse": 6.0,
    "ties": "keep",
}


def build(
    parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int
) -> Matcher:
    """The matcher that is trained in round two."""
    choices = {"base_model": tuple(BASE_MODELS), "miner": MINERS, "start": STARTS}
    for name, allowed in choices.items():
        if parameters[name] not in allowed:
            expected = f"one of {', '.join(allowed)}"
            raise input_error(name, repr(parameters[name]), expected)
    given = {**FIXED, "caption_word_dim": parameters["word_dim"], **parameters}
    return BASE_MODELS[parameters["base_model"]](given, vocabulary_size, image_dim)


def mines_itself(parameters: Mapping[str, Any]) -> bool:
    """Whether the miner is a matcher of the host's kind."""
    return parameters["miner"] == "self" or parameters["base_model"] == "vsrn"


def build_miner(
    parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int
) -> Matcher:
    """The matcher of round one, whose lists round two draws from."""
    if mines_itself(parameters):
        return build(parameters, vocabulary_size, image_dim)
    width = parameters["miner_width"] or parameters["width"]
    given = {**parameters, "base_model": "vsrn", "width": width}
    return build(given, vocabulary_size, image_dim)


# cell rounds
class Round(NamedTuple):
    """One training: what is trained, for what, and for how long."""

    name: str
    matcher: Matcher
    objective: OfflineLoss
    epochs: int
    batch_size: int
    learning_rate: float
    decay_every: int


NUMBERS = ("margin", "offline_margin", "alpha", "beta")
SWITCHED = ("kind", "weigh_by", "detach", "clamp", "squared", "by_image")


def stages_of(parameters: Mapping[str, Any], model: Matcher) -> list[Round]:
    """The trainings of a run: the miner's, the host's own if fine-tuned, and round two.

    A model that is fine-tuned had its warm-up in round one. A run with the online loss
    needs no lists; it still measures itself on those of a shared round one.
    """
    p = parameters
    names = ("epochs", "batch_size", "learning_rate", "decay_every")
    plain = {"kind": "online", "margin": p["margin"], "by_image": p["by_image"]}
    online = OfflineLoss(**plain, warmup_epochs=p["first_warmup_epochs"])
    sizes = (model.config["vocabulary_size"], model.config["image_dim"])
    tuned, rounds = p["start"] == "fine-tune", []
    if p["kind"] != "online" or p["round_one"] or (tuned and mines_itself(p)):
        torch.manual_seed(p["seed"])  # the first weights of a shared miner
        first = [p[f"first_{name}"] for name in names]
        rounds.append(Round("miner", build_miner(p, *sizes), online, *first))
    if tuned and not mines_itself(p):
        torch.manual_seed(p["seed"])
        own = p["base_epochs"], p["batch_size"], p["learning_rate"]
        base_model = build(p, *sizes)
        rounds.append(
            Round("base_model", base_model, online, *own, p["base_decay_every"])
        )
    chosen = {name: p[name] for name in (*NUMBERS, *SWITCHED)}
    loss = OfflineLoss(**chosen, warmup_epochs=0 if tuned else p["warmup_epochs"])
    return [*rounds, Round("final", model, loss, *(p[name] for name in names))]


# cell curves-data
WAYS = ("i2t", "t2i")


def dev_curves(log: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Direction → R@1 on dev after each epoch."""
    ends = [line for line in log if "val_rsum" in line]
    return {way: [line[f"val_{way}_r1"] for line in ends] for way in WAYS}


def epochs_to(curve: list[float], goal: float, other: int = 0) -> int:
    """Epochs until a curve reaches a value.

    If it never does: one more than it has, or than the ``other`` epochs of the run it is
    compared with, whichever are more. So a miss is never the shorter way.
    """
    reached = (epoch for epoch, value in enumerate(curve, start=1) if value >= goal)
    return next(reached, max(len(curve), other) + 1)


def online_curves(folder: str | Path) -> dict[str, list[float]]:
    """The curves of a finished run with the online loss."""
    path = Path(folder) / "final" / "log.jsonl"
    if not path.is_file():
        hint = "Run the online arm of this seed first, or leave online_run empty."
        raise input_error(path, "no such file", "the log of the online run", hint)
    lines = path.read_text(encoding="utf-8").splitlines()
    return dev_curves([json.loads(line) for line in lines])


# cell false-share
def false_shares(listed: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(h,): for each place of the lists, the share of entries that are true after all.

    listed: (n, h) candidates, best first. truth: (n, m), which candidates are true.
    """
    return np.take_along_axis(truth, listed.astype(np.int64), axis=1).mean(axis=0)


# cell cross-rank
def cross_ranks(scores: Scores, owner: np.ndarray) -> np.ndarray:
    """(c,): rank of each right pair in the harder of its two searches, counted from 1.

    Among captions of other images and among other images; the second rank is stretched
    to the range of the first. Ties count against the pair.
    """
    i2t, owner = score_matrix(scores.i2t, "i2t"), np.asarray(owner)
    among_images = retrieval_ranks(scores, owner).t2i + 1
    among_captions = np.empty(len(owner))
    for image, row in enumerate(i2t):
        own = owner == image
        before = ~(row[None, ~own] < row[own][:, None])
        among_captions[own] = 1 + np.count_nonzero(before, axis=1)
    each = len(owner) / len(i2t)  # captions an image has: five
    return np.maximum(each * among_images - (each - 1), among_captions)


FAR = 200 / 25_000  # of all captions: beyond this a pair is far


def cross_shares(scores: Scores, owner: np.ndarray) -> dict[str, float]:
    """In percent: right pairs that win both searches, and those far behind in one."""
    ranks = cross_ranks(scores, owner)
    first, far = ranks == 1, ranks > FAR * len(owner)
    names = ("cross_rank_first_share", "cross_rank_far_share")
    return dict(zip(names, (100 * float(x.mean()) for x in (first, far)), strict=True))


# cell gaps
def held_out_lines(
    scores: Scores, miner: Scores, owner: Tensor, batch: int, kept: tuple[int, int]
) -> tuple[Line, Line]:
    """Both lines, joined over random batches of a split that nobody trained on.

    miner: scores of the model that mines. kept: lengths of the lists of captions and of
    images. The draws are the same whatever the scores.
    """
    generator = torch.Generator().manual_seed(0)
    wrong = owner[None, :] != torch.arange(len(scores.i2t))[:, None]  # (i, c)
    captions = miner.i2t.masked_fill(~wrong, -math.inf).topk(kept[0], dim=1).indices
    images = miner.t2i.masked_fill(~wrong, -math.inf).topk(kept[1], dim=0).indices.T
    loss, parts = ScoreLoss("OffTri"), []
    for some in torch.randperm(len(owner), generator=generator).split(batch):
        if len(some) < batch:
            break
        of = owner[some]
        square = Scores(scores.i2t[of][:, some], scores.t2i[of][:, some])
        a, b = (torch.randint(n, (batch,), generator=generator) for n in kept)
        offline = OfflineScores(
            scores.i2t[of, captions[of, a]], scores.t2i[images[some, b], some]
        )
        same = of[:, None] == of
        parts.append(loss.lines(asked_of(square), square, same, offline))
    lines = ([line[:3] for line in side] for side in zip(*parts, strict=True))
    return tuple(Line(*map(torch.cat, zip(*side, strict=True))) for side in lines)


# cell gap-numbers
def mean_right_score(scores: Scores, owner: Tensor) -> float:
    """Mean score of the right pairs of a split, both directions together."""
    each = torch.arange(len(owner))
    both = torch.stack([scores.i2t[owner, each], scores.t2i[owner, each]])
    return both.double().mean().item()


def score_gaps(lines: tuple[Line, Line]) -> dict[str, float]:
    """Gaps between the three classes of pairs, and in percent the anchors out of order."""
    positive, online, offline, _ = (
        torch.cat(part) if part[0] is not None else None
        for part in zip(*lines, strict=True)
    )
    wrong_order = (positive <= offline) | (offline <= online)
    return {
        "gap_positive_offline": (positive - offline).mean().item(),
        "gap_offline_online": (offline - online).mean().item(),
        "order_violations": 100 * wrong_order.float().mean().item(),
        "mean_listed_score": offline.mean().item(),
    }

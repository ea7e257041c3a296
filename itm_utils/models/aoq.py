# Generated from notebooks/10_aoq.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/10_aoq.ipynb exports."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from itm_utils.errors import input_error
from itm_utils.fast_attention import score_selected
from itm_utils.matcher import Images, Matcher, PairBatch, Scores, Texts
from itm_utils.models import bfan, scan, vsrn
from itm_utils.models.mmca import HardNegativeTripletLoss, positive_pairs
from itm_utils.models.vsepp import HingeTriplet
from itm_utils.scoring import score_all, trim
from itm_utils.training import Stage, train_config


# cell anchor-scores
class AnchorScores(NamedTuple):
    """Scores (b,) that the loss compares; minus infinity where there is no such pair.

    positive: of the positive pair. online: with the hardest negative of the batch.
    offline: with an offline negative. derived: of a negative pair without the anchor.
    """

    positive: Tensor
    online: Tensor
    offline: Tensor
    derived: Tensor


# cell loss-config
KINDS = ("online", "OffTri", "OffQuin", "AdapOffQuin", "OnlyOffline", "OnlineQuin")
WEIGHED_BY = ("offline", "positive")


@dataclass(frozen=True)
class LossConfig:
    """Which loss of this chapter; the default is equation 5 with the paper's constants.

    kind: which terms count. weigh_by: whose score the online one is compared with in the
    weight. detach: no gradient through the weight. clamp: no negative weight. squared:
    squared hinges.
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

    @property
    def derives_online(self) -> bool:
        return self.kind == "OnlineQuin"

    @property
    def derives_offline(self) -> bool:
        return self.has_derived and not self.derives_online


# cell anchor-loss
def hinge(positive: Tensor, negative: Tensor, margin: float, squared: bool) -> Tensor:
    """(b,): by how much a negative comes within the margin of the positive."""
    violation = (margin - positive + negative).relu()
    return violation.square() if squared else violation


def adaptive_weight(scores: AnchorScores, config: LossConfig) -> Tensor:
    """(b,): weight of the online term; ones where the loss is not adaptive."""
    if config.kind != "AdapOffQuin":
        return torch.ones_like(scores.positive)
    reference = scores.offline if config.weigh_by == "offline" else scores.positive
    online = scores.online.masked_fill(scores.online == -math.inf, 0)
    weight = config.beta - (reference - online) / config.alpha
    weight = weight.clamp(min=0) if config.clamp else weight
    return weight.detach() if config.detach else weight


def anchor_loss(scores: AnchorScores, config: LossConfig) -> Tensor:
    """(b,): the terms of each anchor, added: equations 2 to 5, by ``config.kind``."""
    positive, online, offline, derived = scores
    margin, squared = config.offline_margin, config.squared
    total = torch.zeros_like(positive)
    if config.kind != "OnlyOffline":
        online_term = hinge(positive, online, config.margin, squared)
        total = total + adaptive_weight(scores, config) * online_term
    if config.has_offline:
        total = total + hinge(positive, offline, margin, squared)
    if config.has_derived:
        total = total + hinge(positive, derived, margin, squared)
    return total


# cell hardest
class PairScorer(Protocol):
    """Scores (p,), with gradients, of images ``rows`` with captions ``columns``."""

    def __call__(self, rows: Tensor, columns: Tensor) -> Scores: ...


def select_pairs(scores: Scores, rows: Tensor, columns: Tensor) -> Scores:
    """Entries (p,) of score matrices (i, c)."""
    return Scores(scores.i2t[rows, columns], scores.t2i[rows, columns])


def hardest_negatives(scores: Scores, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Hardest caption of each image, hardest image of each caption: (b,) each.

    positive: (b, b), True where image and caption match.
    """
    captions = scores.i2t.masked_fill(positive, -math.inf).argmax(dim=1)
    images = scores.t2i.masked_fill(positive, -math.inf).argmax(dim=0)
    return captions, images


# cell online-scores
def online_scores(
    score_pairs: PairScorer,
    hardest: tuple[Tensor, Tensor],
    positive: Tensor,
    derived: bool,
) -> tuple[AnchorScores, AnchorScores]:
    """Scores within a batch: of the image anchors and of the caption anchors.

    derived: also the hardest image with the hardest caption, and their positives.
    """
    captions, images = hardest
    each = torch.arange(len(positive), device=positive.device)
    rows, columns = [each, each, images], [each, captions, each]
    if derived:
        rows, columns = [*rows, images, captions], [*columns, captions, images]
    found = score_pairs(torch.cat(rows), torch.cat(columns))
    i2t, t2i = found.i2t.split(len(positive)), found.t2i.split(len(positive))
    alone = positive.all(dim=1)  # no negative in the batch
    none = [torch.full_like(i2t[0], -math.inf)] * 2  # neither offline nor derived
    of_images = AnchorScores(i2t[0], i2t[1].masked_fill(alone, -math.inf), *none)
    of_captions = AnchorScores(t2i[0], t2i[2].masked_fill(alone, -math.inf), *none)
    if derived:
        match = positive[images, captions]  # a positive pair: no term
        of_images = of_images._replace(derived=i2t[3].masked_fill(match, -math.inf))
        of_captions = of_captions._replace(derived=t2i[4].masked_fill(match, -math.inf))
    return of_images, of_captions


# cell gather-scores
class OfflineScores(NamedTuple):
    """Scores (b,) of the offline negatives, each in the direction of its anchor."""

    caption: Tensor  # the image with its offline caption, i2t
    image: Tensor  # the caption with its offline image, t2i
    first: Tensor | None = None  # offline image with offline caption, i2t
    second: Tensor | None = None  # image of ``caption``, caption of ``image``, t2i


def gather_scores(
    scores: Scores,
    positive: Tensor,
    offline: OfflineScores | None,
    config: LossConfig,
    score_pairs: PairScorer | None = None,
) -> tuple[AnchorScores, AnchorScores]:
    """Scores of the image anchors and of the caption anchors of a batch.

    scores: (b, b), to find the hardest negatives. positive: (b, b), True where image and
    caption match. score_pairs: scores that count; entries of ``scores`` by default.
    """
    score_pairs = score_pairs or partial(select_pairs, scores)
    hardest = hardest_negatives(scores, positive)
    anchors = online_scores(score_pairs, hardest, positive, config.derives_online)
    if offline is None:
        return anchors
    images, captions = anchors
    images = images._replace(offline=offline.caption)
    captions = captions._replace(offline=offline.image)
    if config.derives_offline:
        images = images._replace(derived=offline.first)
        captions = captions._replace(derived=offline.second)
    return images, captions


# cell encode
def encode_with_offline(
    model: Matcher, batch: PairBatch, config: LossConfig
) -> tuple[Images, Texts]:
    """Encode a batch and, behind it, the offline negatives that a loss needs: (n · b)."""
    parts, needed = [batch], config.has_offline + config.derives_offline
    found = () if batch.offline is None else (batch.offline.first, batch.offline.second)
    parts += [part for part in found[:needed] if part is not None]
    if len(parts) <= needed:
        hint = "Train on itm_utils.data.batches.OfflinePairs."
        found = "a batch without its offline negatives"
        raise input_error(config.kind, found, "one with", hint)
    images = model.encode_image_batches([part.images for part in parts])
    return images, model.encode_text_batches([part.texts for part in parts])


def score_batch(
    model: Matcher, images: Images, texts: Texts, budget: int
) -> tuple[Scores, PairScorer]:
    """All scores (b, b) of a batch, and a scorer of its pairs with gradients.

    budget: bytes; the matrix then has no gradients. 0 for no limit.
    """
    if not budget:
        scores = model.score(images, texts)
        return scores, partial(select_pairs, scores)
    device = next(model.parameters()).device
    scores = score_all(model, images, texts, budget, False, device)
    return scores, partial(score_selected, model, images, texts, budget=budget)


def score_aligned(model: Matcher, images: Images, texts: Texts, budget: int) -> Scores:
    """Scores (b,) with gradients of image b with caption b."""
    if not budget:
        return model.score_pairs(images, texts)
    each = torch.arange(len(images), device=next(model.parameters()).device)
    return score_selected(model, images, texts, each, each, budget)


# cell offline-scores
def offline_scores(
    model: Matcher,
    images: Images,
    texts: Texts,
    pairs: int,
    config: LossConfig,
    budget: int = 0,
) -> OfflineScores | None:
    """Score the offline negatives of a batch of ``pairs`` pairs; None if none are needed.

    images, texts: the encoded pairs with their offline negatives behind them.
    """
    if not config.has_offline:
        return None
    own, first, second = slice(pairs), slice(pairs, 2 * pairs), slice(2 * pairs, None)
    crossed = trim(Texts.cat([texts[first], texts[own], texts[second]]))
    scores = score_aligned(model, images, crossed, budget)
    found = OfflineScores(scores.i2t[own], scores.t2i[first])
    if not config.derives_offline:
        return found
    derived = score_aligned(model, images[first], trim(texts[first]), budget)
    return found._replace(first=derived.i2t, second=scores.t2i[second])


# cell statistics
def loss_statistics(
    anchors: tuple[AnchorScores, AnchorScores], config: LossConfig
) -> dict[str, Tensor]:
    """Mean scores of a batch, and statistics of its weights, for the log: () each."""
    both = AnchorScores(*(torch.cat(x).detach() for x in zip(*anchors, strict=True)))
    exists = both.online > -math.inf
    numbers = {"positive": both.positive.mean()}
    total = torch.where(exists, both.online, 0).sum()
    numbers["online"] = total / exists.sum().clamp(min=1)
    if config.has_offline:
        numbers["offline"] = both.offline.mean()
    if config.kind == "AdapOffQuin":
        weight = adaptive_weight(both, config)
        violated = hinge(both.positive, both.online, config.margin, config.squared) > 0
        numbers["weight"] = weight.mean()
        numbers["negative"] = (weight < 0).float().mean()
        numbers["rewarded"] = ((weight < 0) & violated).float().mean()
    return numbers


# cell objective
@dataclass(eq=False)
class OfflineLoss:
    """The objective: online negatives from the batch, offline ones from mined lists.

    by_image: captions of one image are all positives of it; else only the pair itself.
    warmup_epochs: with all negatives of the batch, without lists. budget: 0; or bytes,
    where pairs are expensive: few of them (``negatives`` in warm-up) get gradients.
    """

    config: LossConfig = field(default_factory=LossConfig)
    by_image: bool = True
    warmup_epochs: int = 0
    negatives: int = 4
    budget: int = 0

    def __post_init__(self) -> None:
        margin = self.config.margin
        given: dict[str, Any] = {"hardest": False, "by_image": self.by_image}
        self._warmup = HingeTriplet(margin, **given)
        if self.budget:
            given |= {"negatives": self.negatives, "budget": self.budget}
            self._warmup = HardNegativeTripletLoss(margin, **given)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """The training loop calls this at the start of each epoch, counted from 0."""
        self.hardest_now = epoch >= self.warmup_epochs

    def __call__(self, model: Matcher, batch: PairBatch) -> tuple[Tensor, dict[str, Any]]:
        if not self.hardest_now:
            return self._warmup(model, batch)
        config, budget = self.config, self.budget
        every_image, every_text = encode_with_offline(model, batch, config)
        every = (every_image, every_text, len(batch), config, budget)
        offline = offline_scores(model, *every)
        images, texts = every_image[: len(batch)], trim(every_text[: len(batch)])
        scores, score_pairs = score_batch(model, images, texts, budget)
        positive = positive_pairs(batch, self.by_image)
        anchors = gather_scores(scores, positive, offline, config, score_pairs)
        extra = model.extra_losses(images, texts, batch)
        loss = offline_loss(anchors, config) + sum(extra.values())
        return loss, {"hardest": 1.0} | loss_statistics(anchors, config)


# cell objective-call
def offline_loss(
    anchors: tuple[AnchorScores, AnchorScores], config: LossConfig
) -> Tensor:
    """The loss of a batch: both directions added; a sum over pairs, not a mean."""
    images, captions = anchors
    return anchor_loss(images, config).sum() + anchor_loss(captions, config).sum()


# cell build
BASE_MODELS = {"vsrn": vsrn.build, "scan": scan.build, "bfan": bfan.build}
MINERS = ("vsrn", "self")
STARTS = ("scratch", "fine-tune")
SELECTED_BY = (
    "rsum",
    "r1_r5",
)  # all six recalls on dev, or R@1 and R@5 of both directions
FIXED = {  # the same in every run: of VSRN's caption decoder, of SCAN, of BFAN
    "caption_dropout": 0.2,
    "max_len": 60,
    "first_norm": "clipped_l2norm",
    "ties": "keep",
}


def build(
    parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int
) -> Matcher:
    """The base model, which is trained in round two."""
    choices = {"base_model": tuple(BASE_MODELS), "miner": MINERS, "start": STARTS}
    choices |= {"select_by": SELECTED_BY, "first_select_by": SELECTED_BY}
    for name, allowed in choices.items():
        if parameters[name] not in allowed:
            expected = f"one of {', '.join(allowed)}"
            raise input_error(name, repr(parameters[name]), expected)
    given = {**FIXED, "caption_word_dim": parameters["word_dim"], **parameters}
    return BASE_MODELS[parameters["base_model"]](given, vocabulary_size, image_dim)


def mines_itself(parameters: Mapping[str, Any]) -> bool:
    """Whether the miner has the architecture of the base model."""
    return parameters["miner"] == "self" or parameters["base_model"] == "vsrn"


def build_miner(
    parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int
) -> Matcher:
    """The matcher of round one, which mines the offline negatives of round two."""
    if mines_itself(parameters):
        return build(parameters, vocabulary_size, image_dim)
    width = parameters["miner_width"] or parameters["width"]
    given = {**parameters, "base_model": "vsrn", "width": width}
    return build(given, vocabulary_size, image_dim)


# cell stages
ROUND = ("epochs", "batch_size", "learning_rate", "decay_every")


def stages(parameters: Mapping[str, Any], model: Matcher) -> list[Stage]:
    """The trainings of a run: miner, the base model's own if fine-tuned, round two.

    A model that is fine-tuned had its warm-up in round one. A run with the online loss
    needs no lists; it is still measured with those of a shared round one.
    """
    p, rounds = parameters, []
    tuned, own_miner = p["start"] == "fine-tune", mines_itself(p)
    online = LossConfig("online", p["margin"])
    online = OfflineLoss(online, p["by_image"], p["first_warmup_epochs"])
    sizes = (model.config["vocabulary_size"], model.config["image_dim"])
    if p["kind"] != "online" or p["round_one"] or (tuned and own_miner):
        torch.manual_seed(p["seed"])  # a shared miner has the same initial weights
        given = {name: p[f"first_{name}"] for name in ROUND}
        config = train_config(p, select=p["first_select_by"], **given)
        miner = build_miner(p, *sizes)
        rounds.append(Stage("miner", miner, online, config, mines=True))
    if tuned and not own_miner:
        torch.manual_seed(p["seed"])
        length = {"epochs": p["base_epochs"], "decay_every": p["base_decay_every"]}
        base_model = build(p, *sizes)
        config = train_config(p, select=p["select_by"], **length)
        rounds.append(Stage("base_model", base_model, online, config))
    loss = LossConfig(**{known.name: p[known.name] for known in fields(LossConfig)})
    loss = OfflineLoss(loss, p["by_image"], 0 if tuned else p["warmup_epochs"])
    final = train_config(p, select=p["select_by"])
    return [*rounds, Stage("final", model, loss, final)]

# Generated from notebooks/08_mmca.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/08_mmca.ipynb exports."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from itm_lab.parity.comparison import (
    Table,
    all_scores,
    batches,
    compare_gradients,
    load_public,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from itm_utils.errors import input_error
from itm_utils.matcher import (
    Attention,
    Encoded,
    ImageBatch,
    Images,
    Matcher,
    PairBatch,
    Scores,
    TextBatch,
    Texts,
)
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.saem import TextCNN, TransformerLayer
from itm_utils.models.vsepp import hinge_loss, l2_normalize
from itm_utils.scoring import block_shape, score_all


# cell stacked
def stacked(
    unit: TransformerLayer,
    regions: Tensor,
    words: Tensor,
    region_mask: Tensor,
    word_mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Regions (b, r, d) and words (b, w, d) of given pairs after one unit over both."""
    joint = torch.cat([regions, words], dim=1)
    mask = torch.cat([region_mask, word_mask], dim=1)
    joint, _ = unit(joint, mask)
    return joint[:, : regions.shape[1]], joint[:, regions.shape[1] :]


# cell look
def additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    """0 where there is a key, minus infinity where there is none: to be added to logits."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -math.inf)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """What queries (b, q, h, e) find among keys and values (b, k, h, e), and how loudly.

    Queries come scaled, by one over the root of e. mask: (b, k), True where there is a
    key. Returns found (b, q, h, e) and loudness (b, q, h), the log of the sum of
    exponentials.
    """
    logits = torch.einsum("bqhe,bkhe->bhqk", queries, keys)
    logits = logits + additive_mask(mask, logits)[:, None, None]
    logsumexp = logits.logsumexp(dim=-1, keepdim=True)
    found = torch.einsum("bhqk,bkhe->bqhe", (logits - logsumexp).exp(), values)
    return found, logsumexp[..., 0].mT


def attend_all_pairs(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for all pairs of m items that ask, (m, q, h, e), and n that answer, (n, k, h, e).

    Returns found (m, n, q, h, e) and loudness (m, n, q, h).
    """
    logits = torch.einsum("mqhe,nkhe->hmqnk", queries, keys)
    logits = logits + additive_mask(mask, logits)
    logsumexp = logits.logsumexp(dim=-1, keepdim=True)
    weights = (logits - logsumexp).exp()
    found = torch.einsum("hmqnk,nkhe->mnqhe", weights, values)
    return found, logsumexp[..., 0].permute(1, 3, 2, 0)


# cell cross-unit
BLOCKS = ("all", "own", "other")


class CrossUnit(TransformerLayer):
    """A Transformer unit over [regions; words] that does once an item what needs no pair.

    Its looks have no dropout; what follows them has.
    """

    def __init__(
        self, width: int, heads: int, feed_forward: int, dropout: float, blocks: str
    ) -> None:
        super().__init__(width, heads, feed_forward, dropout, "relu", eps=1e-5)
        self.blocks = blocks

    def prepare(self, vectors: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Of items (n, k, d): projections (n, k, h, e), and what each finds in itself."""
        split = (self.attention.heads, -1)
        query = self.attention.q_proj(vectors).unflatten(-1, split)
        key = self.attention.k_proj(vectors).unflatten(-1, split)
        value = self.attention.v_proj(vectors).unflatten(-1, split)
        query = query / math.sqrt(query.shape[-1])
        own, logsumexp = attend(query, key, value, mask)
        made = {"query": query, "key": key, "value": value}
        return made | {"own": own, "loudness": logsumexp}

    def mix(
        self, own: Tensor, own_loudness: Tensor, other: Tensor, other_loudness: Tensor
    ) -> Tensor:
        """One softmax over both sides, from a softmax over each."""
        if self.blocks == "all":
            gate = torch.sigmoid(other_loudness - own_loudness)
            return torch.lerp(own, other, gate[..., None])
        return other if self.blocks == "other" else own.expand_as(other)

    def attention_output(self, vectors: Tensor, found: Tensor) -> Tensor:
        """What follows the look; vectors (…, k, d), found (…, k, h, e)."""
        return self.ffn(vectors, self.attention.out_proj(found.flatten(-2)))


# cell cross-sides
def of_pairs(unit: CrossUnit, one: Encoded, other: Encoded) -> Tensor:
    """Side ``one`` of given pairs after the unit: (b, k, d)."""
    mine, theirs = one.extra_local, other.extra_local
    answers = (theirs["key"], theirs["value"], other.mask)
    found, logsumexp = attend(mine["query"], *answers)
    return unit.attention_output(
        one.local, unit.mix(mine["own"], mine["loudness"], found, logsumexp)
    )


def of_all_pairs(unit: CrossUnit, one: Encoded, other: Encoded) -> Tensor:
    """Side ``one`` of all pairs after the unit: (m, n, k, d)."""
    mine, theirs = one.extra_local, other.extra_local
    answers = (theirs["key"], theirs["value"], other.mask)
    found, logsumexp = attend_all_pairs(mine["query"], *answers)
    own, own_loudness = mine["own"][:, None], mine["loudness"][:, None]
    found = unit.mix(own, own_loudness, found, logsumexp)
    return unit.attention_output(one.local[:, None], found)


# cell pair-cnn
PARTS = ("both", "first", "cross")


def check_choices(parts: str, blocks: str) -> None:
    """A misspelt option is an error, not another model."""
    for name, value, choices in (("parts", parts, PARTS), ("blocks", blocks, BLOCKS)):
        if value not in choices:
            raise input_error(name, repr(value), f"one of {', '.join(choices)}")


class PairTextCNN(TextCNN):
    """The text CNN of SAEM for many short rows: a matrix product for each tap of a filter."""

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens (b, w, d) with mask (b, w) to (b, 3 * channels)."""
        lengths = mask.sum(dim=1, keepdim=True)  # (b, 1)
        tokens = torch.where(mask[..., None], tokens, 0)
        missing = max(0, len(self.convs) - tokens.shape[1])
        tokens = nn.functional.pad(tokens, (0, 0, 0, missing))
        best = []
        for window, conv in enumerate(self.convs, start=1):
            places = tokens.shape[1] - window + 1
            taps = conv.weight.unbind(dim=2)  # window times (channels, d)
            answers = sum(
                tokens[:, start : start + places] @ tap.T
                for start, tap in enumerate(taps)
            )
            inside = (lengths - window + 1).clamp(min=1)  # (b, 1)
            outside = torch.arange(places, device=mask.device) >= inside
            answers = answers + torch.where(outside, -math.inf, 0.0)[..., None]
            best.append((answers.amax(dim=1) + conv.bias).relu())
        return torch.cat(best, dim=1)


# cell mmca-weights
class MMCAParts(Matcher):
    """The weights of MMCA, and what its options mean.

    heads: 16 in the paper, whatever the width (M23); 0 for heads of 16 numbers.
    feed_forward: width inside the units; 0 for the same as outside. cross_weight: of the
    second score. parts: which scores count. blocks: what the cross unit may see.
    one_vector: the mean of the regions stands for all of them.
    """

    def __init__(
        self,
        image_dim: int,
        token_dim: int = 768,
        width: int = 256,
        heads: int = 16,
        feed_forward: int = 0,
        dropout: float = 0.0,
        cross_weight: float = 0.2,
        parts: str = "both",
        blocks: str = "all",
        one_vector: bool = False,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(**given)
        check_choices(parts, blocks)
        self.cross_weight, self.parts, self.one_vector = cross_weight, parts, one_vector
        inner, heads = feed_forward or width, heads or max(1, width // 16)
        self.region_proj = nn.Linear(image_dim, width)
        self.self_unit = TransformerLayer(width, heads, inner, dropout, "relu", 1e-5)
        self.text_cnn = TextCNN(token_dim, width)
        self.text_proj = nn.Linear(3 * width, width)
        self.token_proj = nn.Linear(token_dim, width)
        self.cross_unit = CrossUnit(width, heads, inner, dropout, blocks)
        self.cross_cnn = PairTextCNN(width, width)
        self.cross_proj = nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    @property
    def crosses(self) -> bool:
        """Whether the second score counts at all."""
        return self.parts == "cross" or (
            self.parts == "both" and self.cross_weight != 0
        )


# cell mmca-encode
class MMCAEncoders(MMCAParts):
    """Both sides up to where they meet."""

    def encode_images(self, batch: ImageBatch) -> Images:
        features, mask = batch.regions, batch.mask
        if self.one_vector:
            features = masked_mean(features, mask)[:, None]
            mask = mask.any(dim=1, keepdim=True)
        regions = self.region_proj(features)
        thought, _ = self.self_unit(regions, mask)
        pooled = l2_normalize(masked_mean(thought, mask))  # i0 in the paper
        prepared = self.cross_unit.prepare(regions, mask) if self.crosses else {}
        return Images(regions, mask, pooled, extra_local=prepared)

    def encode_texts(self, batch: TextBatch) -> Texts:
        if batch.features is None:
            hint = "Open the captions with itm_lab.data.opening.token_states."
            raise input_error("captions", "word ids", "states of a text encoder", hint)
        tokens, mask = batch.features, batch.mask
        read = self.dropout(self.text_cnn(tokens, mask))
        pooled = l2_normalize(self.text_proj(read))  # c0 in the paper
        words = self.token_proj(tokens)
        prepared = self.cross_unit.prepare(words, mask) if self.crosses else {}
        return Texts(words, mask, pooled, extra_local=prepared)

    def image_vector(self, regions: Tensor, mask: Tensor) -> Tensor:
        """i1: regions (b, r, d) after the cross unit to (b, d)."""
        return l2_normalize(masked_mean(regions, mask))

    def caption_vector(self, words: Tensor, mask: Tensor) -> Tensor:
        """c1: words (b, w, d) after the cross unit to (b, d)."""
        return l2_normalize(self.cross_proj(self.dropout(self.cross_cnn(words, mask))))


# cell mmca-score
TILE = 2**26  # bytes of pairs that are worked on at once, where there is no GPU


class MMCACross(MMCAEncoders):
    """The second score, of all pairs."""

    def cross_score_tile(self, images: Images, texts: Texts) -> Tensor:
        """The second score of all pairs of a tile: (i, c)."""
        regions = of_all_pairs(self.cross_unit, images, texts)  # (i, c, r, d)
        words = of_all_pairs(self.cross_unit, texts, images)  # (c, i, w, d)
        region_mask = images.mask[:, None].expand(regions.shape[:3]).flatten(0, 1)
        word_mask = texts.mask[:, None].expand(words.shape[:3]).flatten(0, 1)
        i1 = self.image_vector(regions.flatten(0, 1), region_mask)
        c1 = self.caption_vector(words.flatten(0, 1), word_mask)
        i1, c1 = i1.unflatten(0, regions.shape[:2]), c1.unflatten(0, words.shape[:2])
        return torch.einsum("icd,cid->ic", i1, c1)

    def cross_scores(self, images: Images, texts: Texts) -> Tensor:
        """The second score of all pairs (i, c), tile by tile where there is no GPU."""
        if self.cross_unit.blocks == "own":  # no partner: one vector each
            regions, words = (
                self.cross_unit.attention_output(side.local, side.extra_local["own"])
                for side in (images, texts)
            )
            i1 = self.image_vector(regions, images.mask)
            return i1 @ self.caption_vector(words, texts.mask).T
        rows, columns = len(images), len(texts)
        if images.local.device.type == "cpu":
            rows, columns = block_shape(self, images, texts, TILE)
        tiles = [
            [
                self.cross_score_tile(images[i : i + rows], texts[c : c + columns])
                for c in range(0, len(texts), columns)
            ]
            for i in range(0, len(images), rows)
        ]
        return torch.cat([torch.cat(row, dim=1) for row in tiles])


# cell mmca-both
class MMCAScores(MMCACross):
    """The sum of the two scores."""

    def weigh(self, first: Tensor, cross: Tensor) -> Scores:
        both = first + self.cross_weight * cross
        return Scores.same(cross if self.parts == "cross" else both)

    def score(self, images: Images, texts: Texts) -> Scores:
        first = images.pooled @ texts.pooled.T
        if not self.crosses:
            return Scores.same(first)
        return self.weigh(first, self.cross_scores(images, texts))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        first = (images.pooled * texts.pooled).sum(dim=-1)
        if not self.crosses:
            return Scores.same(first)
        regions = of_pairs(self.cross_unit, images, texts)
        words = of_pairs(self.cross_unit, texts, images)
        i1 = self.image_vector(regions, images.mask)
        c1 = self.caption_vector(words, texts.mask)
        return self.weigh(first, (i1 * c1).sum(dim=-1))

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        if not self.crosses:
            return 4  # one number; the rest is a matrix product
        r, width = images.local.shape[1:]
        w, heads = texts.local.shape[1], self.cross_unit.attention.heads
        numbers = (r + w) * width + w * width + heads * r * w  # sides, taps, logits
        return 6 * 4 * numbers  # an estimate: six of each alive at once, 4 bytes


# cell mmca-attention
class MMCAAttention(MMCAScores):
    """Who looks at whom in given pairs."""

    def joint_logs(self, images: Images, texts: Texts) -> Tensor:
        """Logs of the softmax over [regions; words]: (b, h, r + w, r + w)."""
        query, key = (
            torch.cat([images.extra_local[name], texts.extra_local[name]], dim=1)
            for name in ("query", "key")
        )
        logits = torch.einsum("bqhe,bkhe->bhqk", query, key)
        mask = torch.cat([images.mask, texts.mask], dim=1)
        places = torch.arange(mask.shape[1], device=mask.device)
        is_region = places < images.mask.shape[1]
        same = is_region[:, None] == is_region
        kinds = {"all": torch.ones_like(same), "own": same, "other": ~same}
        seen = kinds[self.cross_unit.blocks] & mask[:, None, None]
        return (logits + additive_mask(seen, logits)).log_softmax(dim=-1)

    def joint_attention(self, images: Images, texts: Texts) -> Tensor:
        """The whole square of weights: (b, h, r + w, r + w)."""
        return self.joint_logs(images, texts).exp()

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        if not self.crosses or self.cross_unit.blocks == "own":
            return {}
        logs, r = self.joint_logs(images, texts), images.mask.shape[1]
        sides = {"t2i": (texts, images, logs[:, :, r:, :r])}
        sides["i2t"] = (images, texts, logs[:, :, :r, r:])
        # a key that is padding has no slope, not that of minus infinity
        low = torch.finfo(logs.dtype).min / 2
        return {  # all heads together, scaled to one
            way: Attention(
                part.masked_fill(~other.mask[:, None, None], low)
                .logsumexp(dim=1)
                .softmax(dim=-1),
                one.local,
                other.local,
                one.mask,
                other.mask,
            )
            for way, (one, other, part) in sides.items()
        }


# cell mmca-class
UNIT_NAMES = {
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "o": "attention.out_proj",
    "ffn1": "linear1",
    "ffn2": "linear2",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
}


class MMCA(MMCAAttention):
    """Intra- and inter-modality in one attention (Wei et al., 2020)."""

    PUBLIC_NAMES: ClassVar[dict[str, str]] = {
        "region_fc": "region_proj",
        "text_fc": "token_proj",
        "text_cnn0.fc": "text_proj",
        "text_cnn1.fc": "cross_proj",
        **{f"text_cnn0.conv{n}": f"text_cnn.convs.{n - 1}" for n in (1, 2, 3)},
        **{f"text_cnn1.conv{n}": f"cross_cnn.convs.{n - 1}" for n in (1, 2, 3)},
        **{f"self_unit.{n}": f"self_unit.{UNIT_NAMES[n]}" for n in UNIT_NAMES},
        **{f"cross_unit.{n}": f"cross_unit.{UNIT_NAMES[n]}" for n in UNIT_NAMES},
    }

    @classmethod
    def from_public(
        cls, state_dict: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> Self:
        """From weights named as in the golden cases of this book: we found no public code."""
        width, image_dim = state_dict["region_fc.weight"].shape
        config = {
            "token_dim": state_dict["text_fc.weight"].shape[1],
            "feed_forward": len(state_dict["cross_unit.ffn1.weight"]),
            "heads": options["h"],
            "cross_weight": options["alpha"],
        }
        return load_public(
            cls(image_dim, width=width, **config), state_dict, cls.PUBLIC_NAMES
        )


# cell build
SIZES = ("token_dim", "width", "heads", "dropout", "cross_weight")
SWITCHES = ("parts", "blocks", "one_vector")


def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> MMCA:
    """The model that the chapter's parameters describe; words come as token states."""
    return MMCA(image_dim, **{name: parameters[name] for name in (*SIZES, *SWITCHES)})


# cell pick
PICKS_FIRST = True  # all pairs without gradients, few with; `itm run --dry-run` asks


def pick_hardest(
    model: Matcher, images: Images, texts: Texts, budget: int
) -> tuple[Tensor, Tensor]:
    """Hardest wrong caption of each picture and picture of each caption: (b, 1) each."""
    device = next(model.parameters()).device
    scores = score_all(model, images, texts, budget, progress=False, device=device)
    right = torch.eye(len(images), dtype=torch.bool, device=device)
    captions = scores.i2t.masked_fill(right, -math.inf).argmax(dim=1)
    pictures = scores.t2i.masked_fill(right, -math.inf).argmax(dim=0)
    return captions[:, None], pictures[:, None]


def pick_random(pairs: int, count: int) -> tuple[Tensor, Tensor]:
    """For each pair ``count`` wrong captions and wrong pictures, none twice: (b, count).

    Drawn on the processor, so that a seed means the same on every device.
    """
    chance = torch.rand(2, pairs, pairs)
    chance.diagonal(dim1=1, dim2=2).fill_(-1)  # never the right one
    captions, pictures = chance.topk(count, dim=2).indices
    return captions, pictures


# cell score-picked
KEPT = 4  # what a graph remembers of a pair, over what scoring it needs: measured in a test


def score_picked(
    model: Matcher,
    images: Images,
    texts: Texts,
    rows: Tensor,
    columns: Tensor,
    budget: int,
) -> Scores:
    """Scores (p,) with gradients of images ``rows`` with texts ``columns``, within a budget."""
    at_a_time = max(1, budget // (KEPT * model.bytes_per_pair(images, texts)))

    def piece(some: Tensor) -> tuple[Tensor, Tensor]:
        scores = model.score_pairs(images[rows[some]], texts[columns[some]])
        return scores.i2t, scores.t2i

    pieces = torch.arange(len(rows), device=rows.device).split(at_a_time)
    if len(pieces) == 1:
        return Scores(*piece(pieces[0]))
    found = [checkpoint(piece, some, use_reentrant=False) for some in pieces]
    return Scores(*(torch.cat(way) for way in zip(*found, strict=True)))


# cell hinges
def picked_hinges(
    model: Matcher,
    images: Images,
    texts: Texts,
    picks: tuple[Tensor, Tensor],
    margin: float,
    budget: int,
) -> Tensor:
    """Sum of the hinges of a batch with the wrong captions and pictures (b, n) picked."""
    device = next(model.parameters()).device
    captions, pictures = (chosen.to(device) for chosen in picks)
    pairs, count = captions.shape
    right = torch.arange(pairs, device=device)
    asked = right.repeat_interleave(count)
    rows = torch.cat([right, asked, pictures.flatten()])
    columns = torch.cat([right, captions.flatten(), asked])
    scores = score_picked(model, images, texts, rows, columns, budget)
    sizes = [pairs, pairs * count, pairs * count]
    right_i2t, wrong_caption, _ = scores.i2t.split(sizes)
    right_t2i, _, wrong_picture = scores.t2i.split(sizes)
    hinges = (margin + wrong_caption - right_i2t[asked]).relu().sum()
    return hinges + (margin + wrong_picture - right_t2i[asked]).relu().sum()


# cell picked-triplet
class HardNegativeTripletLoss:
    """The hinge loss for matchers whose pairs are dear: pick without gradients, then learn.

    warmup_epochs: so many epochs over random wrong pairs before the hardest take over.
    negatives: wrong captions and pictures a pair then; 0 takes all. budget: in bytes.
    """

    def __init__(
        self,
        margin: float = 0.2,
        hardest: bool = True,
        warmup_epochs: int = 0,
        negatives: int = 4,
        budget: int = 2**26,
    ) -> None:
        self.margin, self.hardest, self.warmup_epochs = margin, hardest, warmup_epochs
        self.negatives, self.budget = negatives, budget
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """The training loop calls this at the start of each epoch, counted from 0."""
        self.hardest_now = self.hardest and epoch >= self.warmup_epochs

    def pick(
        self, model: Matcher, images: Images, texts: Texts
    ) -> tuple[Tensor, Tensor]:
        most = len(images) - 1  # a batch of one pair has nobody wrong
        if self.hardest_now and most:
            return pick_hardest(model, images, texts, self.budget)
        return pick_random(len(images), min(self.negatives or most, most))

    def __call__(
        self, model: Matcher, batch: PairBatch
    ) -> tuple[Tensor, dict[str, float]]:
        images = model.encode_images(batch.images)
        texts = model.encode_texts(batch.texts)
        picks = self.pick(model, images, texts)
        hinges = picked_hinges(model, images, texts, picks, self.margin, self.budget)
        drawn = picks[0].shape[1]
        share = (len(images) - 1) / drawn if drawn and not self.hardest_now else 1.0
        own = model.extra_losses(images, texts, batch)
        return share * hinges + sum(own.values()), {"hardest": float(self.hardest_now)}


# cell public-values
def public_values(model: MMCA, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Our values for what a golden case holds under ``mid.*``."""
    image_batch, text_batch = batches(arrays)
    images, texts = model.encode_images(image_batch), model.encode_texts(text_batch)
    regions = of_all_pairs(model.cross_unit, images, texts)  # (i, c, r, d)
    words = of_all_pairs(model.cross_unit, texts, images).transpose(0, 1)
    pairs = [(i, c) for i in range(len(images)) for c in range(len(texts))]
    row, column = torch.tensor(pairs).unbind(dim=1)
    i1 = model.image_vector(regions.flatten(0, 1), images.mask[row])
    c1 = model.caption_vector(words.flatten(0, 1), texts.mask[column])
    i, c = arrays["mid.pair"].tolist()
    joint = model.joint_attention(images[i : i + 1], texts[c : c + 1])[0]
    real = images.mask.shape[1] + int(text_batch.lengths[c])
    shape = (len(images), len(texts))
    return {
        "mid.regions": images.local,
        "mid.i0": images.pooled,
        "mid.c0": texts.pooled,
        "mid.i1": i1.unflatten(0, shape),
        "mid.c1": c1.unflatten(0, shape),
        "mid.pair_attn": joint[:, :real, :real],
    }


# cell compare-case
def compare_case(
    table: Table, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> bool:
    """One golden case: vectors, attention, scores at several weights, loss, gradients."""
    weights = {k[2:]: torch.from_numpy(v) for k, v in arrays.items() if k[:2] == "w."}
    model = MMCA.from_public(weights, about["options"]).eval()
    for name, value in public_values(model, arrays).items():
        table.add("values", name, value, arrays[name])
    own = torch.from_numpy(arrays["in.pair_cap"])
    margin = float(about["options"]["margin"])
    for weight in (*about["options"]["alphas"], about["options"]["alpha"]):
        model.cross_weight = weight
        scores, name = all_scores(model, arrays).i2t, f".alpha{weight:g}"
        loss = hinge_loss(Scores.same(scores[:, own]), margin, hardest=True)
        table.add("values", f"out.sims{name}", scores, arrays[f"out.sims{name}"])
        expected = arrays[f"out.loss_hard{name}"]
        table.add("losses", f"out.loss_hard{name}", loss, expected, relative=True)
    compare_gradients(table, model, arrays, "out.grad.", loss)
    return True

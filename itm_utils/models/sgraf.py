# Generated from notebooks/07_sgraf.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/07_sgraf.ipynb exports."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import torch
from itm_lab.parity.comparison import batches, load_public
from torch import Tensor, nn

from itm_utils.errors import input_error
from itm_utils.matcher import Attention, ImageBatch, Images, Scores, TextBatch, Texts
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.scan import (
    EPS,
    RegionsAndWords,
    TILE,
    TINY,
    attend,
    full_precision,
    pack,
    pack_pairs,
    pair_attention,
    read_words,
    region_layer,
    unit,
)


# cell compare
def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map with the first weights of the public code."""
    return region_layer(inputs, outputs, weight_norm=False)


def compare(x: Tensor, y: Tensor, read: nn.Linear) -> Tensor:
    """Similarity vector (..., s) of two vectors (..., d), of length one."""
    return unit(read((x - y).square()))


# cell norms
class RowNorm(nn.BatchNorm1d):
    """Batch norm of the rows that are real: any number of them, in any order.

    A single row has no spread. Instead of an error it gets the running statistics.
    """

    def rows(self, x: Tensor) -> Tensor:
        """Rows (n, d), all of them real."""
        if not self.training or len(x) > 1:
            return super().forward(x)
        running = self.running_mean, self.running_var
        return nn.functional.batch_norm(
            x, *running, self.weight, self.bias, eps=self.eps
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: (n, k, d); mask: (n, k). Zeros where the mask is False."""
        if mask.is_meta or bool(mask.all()):
            return self.rows(x.flatten(0, 1)).view_as(x)
        rows = self.rows(x[mask])
        return x.new_zeros(x.shape, dtype=rows.dtype).masked_scatter(
            mask[..., None], rows
        )


class SlotNorm(nn.BatchNorm1d):
    """Batch norm of the public code: the third region has a mean and a spread of its own."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if x.shape[1] != self.num_features or not (mask.is_meta or bool(mask.all())):
            found = f"{x.shape[1]} regions, or fewer behind a mask"
            expected = f"exactly {self.num_features}, the number of region_slots"
            raise input_error("region_slots", found, expected)
        return super().forward(x)


# cell one-vector
class OneVector(nn.Module):
    """Regions or words become one vector: their mean asks, and each gets a weight."""

    def __init__(self, width: int, dropout: float, slots: int | None = None) -> None:
        super().__init__()
        self.each, self.mean = linear(width, width), linear(width, width)
        self.weigh = linear(width, 1)
        self.drop = nn.Dropout(dropout)
        self.each_norm = self.mean_norm = None
        if slots is not None:  # pictures have batch norms, sentences have none
            self.each_norm = SlotNorm(slots) if slots else RowNorm(width)
            self.mean_norm = RowNorm(width)

    def weights(self, x: Tensor, mask: Tensor) -> Tensor:
        """(n, k): they sum to one over what is real."""
        each, mean = self.each(x), self.mean(masked_mean(x, mask))
        if self.each_norm is not None:
            each, mean = self.each_norm(each, mask), self.mean_norm.rows(mean)
        each, mean = self.drop(each.tanh()), self.drop(mean.tanh())
        logits = self.weigh(each * mean[:, None])[..., 0]
        return logits.masked_fill(~mask, -torch.inf).softmax(dim=1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: (n, k, d); mask: (n, k). Returns (n, d), of length one."""
        return unit((self.weights(x, mask)[:, None] @ x)[:, 0])


# cell gate-norm
class GateNorm(RowNorm):
    """Batch norm of one number a node.

    by_caption: statistics of each caption alone, and as many updates of the running
    ones as there are captions, in their order: what a loop over captions leaves behind.
    """

    def __init__(self, by_caption: bool) -> None:
        super().__init__(1)
        self.by_caption = by_caption

    def forward(self, gates: list[Tensor], captions: list[Tensor]) -> list[Tensor]:
        """gates: (m, n, k) for each tile; captions: (n,), the place of each in the batch."""
        if self.training and self.by_caption:
            self.remember(gates, captions)
            spread = [g.var(dim=(0, 2), correction=0, keepdim=True) for g in gates]
            means = [g.mean(dim=(0, 2), keepdim=True) for g in gates]
            parts = zip(gates, means, spread, strict=True)
            normal = [(g - mean) * (v + self.eps).rsqrt() for g, mean, v in parts]
            return [self.weight * part + self.bias for part in normal]
        flat = self.rows(torch.cat([g.flatten() for g in gates])[:, None])[:, 0]
        parts = flat.split([g.numel() for g in gates])
        return [part.view_as(g) for part, g in zip(parts, gates, strict=True)]

    @torch.no_grad()
    def remember(self, gates: list[Tensor], captions: list[Tensor]) -> None:
        """Running statistics after one update for each caption, the last one counting most."""
        order = torch.cat(captions).argsort()
        kept = (1 - self.momentum) ** torch.arange(len(order), device=order.device)
        for running, statistic in (
            (self.running_mean, lambda g: g.mean(dim=(0, 2))),
            (self.running_var, lambda g: g.var(dim=(0, 2))),
        ):
            seen = torch.cat([statistic(g) for g in gates])[order]
            new = self.momentum * (kept.flip(0) * seen).sum()
            running.mul_((1 - self.momentum) ** len(order)).add_(new)
        self.num_batches_tracked += len(order)


# cell saf
class Tile(NamedTuple):
    """Some pictures with some sentences of equal length, each pair with its nodes."""

    images: Tensor  # (m,) which pictures these are
    captions: Tensor  # (n,) which sentences
    nodes: Tensor  # (m, n, 1 + w, s): the whole pair first, then its words


class SAF(nn.Module):
    """Similarity attention filtration: a gate decides how much each node counts."""

    def __init__(self, sim_dim: int, by_caption: bool) -> None:
        super().__init__()
        self.gate = linear(sim_dim, 1)
        self.norm = GateNorm(by_caption)

    def weights(self, tiles: list[Tile]) -> list[Tensor]:
        """(m, n, k) for each tile: how much the nodes count; they sum to one."""
        gates = [self.gate(tile.nodes)[..., 0] for tile in tiles]
        gates = self.norm(gates, [tile.captions for tile in tiles])
        gates = [gate.sigmoid() for gate in gates]
        return [g / (g.sum(dim=-1, keepdim=True) + EPS) for g in gates]

    def forward(self, tiles: Iterable[Tile]) -> Iterator[tuple[Tile, Tensor]]:
        """Each tile with one vector a pair, (m, n, s). In training it waits for all tiles,
        because the batch norm does; otherwise one after the other, and memory stays small."""
        groups = [list(tiles)] if self.training else ([tile] for tile in tiles)
        for group in groups:
            for tile, weights in zip(group, self.weights(group), strict=True):
                yield tile, unit((weights[..., None, :] @ tile.nodes)[..., 0, :])


# cell graph-step
class GraphStep(nn.Module):
    """One round of talk among nodes: ask, listen, think."""

    def __init__(self, sim_dim: int) -> None:
        super().__init__()
        self.query, self.key = linear(sim_dim, sim_dim), linear(sim_dim, sim_dim)
        self.out = linear(sim_dim, sim_dim)

    def multiplied(self) -> tuple[Tensor, ...]:
        """query(a) · key(n) = a·Mn + u·n + v·a + t. Here are M, u, v and t."""
        matrix = self.query.weight.T @ self.key.weight
        u, v = self.query.bias @ self.key.weight, self.key.bias @ self.query.weight
        return matrix, u, v, self.query.bias @ self.key.bias

    def edges(self, asking: Tensor, nodes: Tensor, maps: tuple[Tensor, ...]) -> Tensor:
        """How much each asking node listens to each node: (..., a, k), rows sum to one."""
        matrix, u, v, t = maps
        same_for_all = asking @ v + t  # the softmax forgets it
        logits = (asking @ matrix + u) @ nodes.mT + same_for_all[..., None]
        return logits.softmax(dim=-1)

    def forward(
        self, asking: Tensor, nodes: Tensor, maps: tuple[Tensor, ...]
    ) -> Tensor:
        """asking: (..., a, s), nodes: (..., k, s). What the asking nodes have become."""
        return self.out(self.edges(asking, nodes, maps) @ nodes).relu()


# cell sgr
class SGR(nn.Module):
    """Similarity graph reasoning: a few rounds of talk, then ask the node of the whole pair."""

    def __init__(self, sim_dim: int, steps: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(GraphStep(sim_dim) for _ in range(steps))

    def forward(self, tiles: Iterable[Tile]) -> Iterator[tuple[Tile, Tensor]]:
        """Each tile with one vector a pair, (m, n, s), one tile after the other."""
        maps = [step.multiplied() for step in self.steps]  # once, not once a tile
        for tile in tiles:
            nodes = tile.nodes
            for number, step in enumerate(self.steps, start=1):
                last = number == len(self.steps)
                asking = nodes[..., :1, :] if last else nodes  # only one is asked
                nodes = step(asking, nodes, maps[number - 1])
            yield tile, nodes[..., 0, :]


# cell wholes
class WholesAndParts(RegionsAndWords):
    """SCAN's encoders, and one vector for each picture and each sentence as a whole.

    region_slots: 0, or the number of regions that every picture has, to compute both
    batch norms as the public code does.
    """

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        width: int = 1024,
        dropout: float = 0.4,
        region_slots: int = 0,
        **more: Any,
    ) -> None:
        own = {"dropout": dropout, "region_slots": region_slots}
        super().__init__(vocabulary_size, image_dim, width, **more, **own)
        self.drop = nn.Dropout(dropout)
        self.one_image = OneVector(width, dropout, region_slots)
        self.one_text = OneVector(width, dropout)

    def encode_images(self, batch: ImageBatch) -> Images:
        images = super().encode_images(batch)
        images.pooled = self.one_image(images.local, images.mask).to(images.local.dtype)
        return images

    def encode_texts(self, batch: TextBatch) -> Texts:
        words = self.drop(self.word_embedding(batch.words))
        words = read_words(self.gru, words, batch.lengths)
        words = words.to(self.word_embedding.weight.dtype)  # not the autocast one
        words = unit(words) if self.text_norm else words
        whole = self.one_text(words, batch.mask).to(words.dtype)
        return Texts(local=words, mask=batch.mask, pooled=whole)


# cell differences
FIRST_NORM = "clipped_l2norm"  # of chapter 02; SGRAF knows no other


def scaled_look(
    regions: Tensor, words: Tensor, shapes: list[tuple[int, int]], temperature: float
) -> Tensor:
    """Weights (m, r, x) of regions for each word, such that what it finds has length one.

    regions: (m, r, d). words: (x, d) or (m, x, d), in the order that ``attend`` wants.
    """
    weights = attend(regions @ words.mT, shapes, FIRST_NORM, temperature)
    gram = regions @ regions.mT
    square = (weights * (gram @ weights)).sum(dim=1, keepdim=True)
    return weights / (square.clamp_min(TINY).sqrt() + EPS)


def in_work(numbers: int, items: int, device: torch.device) -> int:
    """How many items of so many numbers to take at a time: a processor's cache full."""
    return max(1, min(items, TILE.get(device.type, 2**26) // numbers))


def compare_words(
    regions: Tensor, words: Tensor, look: Tensor, read: nn.Linear
) -> Tensor:
    """Similarity vectors (m, x, s) of words with what they found by ``scaled_look``."""
    words = words.expand(len(regions), -1, -1)
    few = in_work(words[0].numel(), len(words), words.device)
    parts, vectors = (side.split(few) for side in (regions, words, look)), []
    for some, asked, weights in zip(*parts, strict=True):
        apart = torch.baddbmm(asked, weights.mT, some, beta=-1)  # found minus asked
        # in place where no gradient needs what was there before
        squared = apart.square() if torch.is_grad_enabled() else apart.square_()
        vectors.append(unit(read(squared)))
    return torch.cat(vectors)


# cell parts
class Columns(NamedTuple):
    """The words of some sentences side by side, in the order that ``attend`` wants."""

    captions: list[Tensor]  # (n,) for each length: which sentences have it
    words: Tensor  # (x, d): all first words of a length, then all second ones, …
    shapes: list[tuple[int, int]]  # (w, n) for each length


def side_by_side(texts: Texts, captions: Tensor) -> Columns:
    """The real words of the given sentences; padding is left behind."""
    groups = pack(texts[captions])
    words = [group.vectors.transpose(0, 1).flatten(0, 1) for group in groups]
    shapes = [tuple(reversed(group.where.shape)) for group in groups]
    return Columns([captions[g.index] for g in groups], torch.cat(words), shapes)


def by_shape(vectors: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Vectors (m, x, s) of all words as (m, n, w, s) for each shape (w, n)."""
    parts = zip(vectors.split([w * n for w, n in shapes], dim=1), shapes, strict=True)
    return [part.unflatten(1, shape).transpose(1, 2) for part, shape in parts]


def in_parts(
    images: Images, texts: Texts, sim_dim: int, at_once: bool
) -> Iterator[tuple[Tensor, Tensor, Columns]]:
    """Some pictures (m,), their regions (m, r, d), and some sentences, until all have met."""
    rows, by_length = pack(images), texts.mask.sum(dim=1).argsort(stable=True)
    device = texts.local.device
    some = in_work(texts.local[0].numel(), len(texts), device)
    for part in by_length.split(len(texts) if at_once else some):
        columns = side_by_side(texts, part)
        for group in rows:
            several = len(group.index)
            if not at_once:
                several = in_work(len(columns.words) * sim_dim, several, device)
            split = group.index.split(several), group.vectors.split(several)
            for index, regions in zip(*split, strict=True):
                yield index, regions, columns


# cell pair-nodes
class PairNodes(WholesAndParts):
    """The nodes of a pair: how the wholes fit, and how each word fits what it found."""

    def __init__(
        self, *sizes: int, sim_dim: int = 256, temperature: float = 9.0, **more: Any
    ) -> None:
        super().__init__(*sizes, sim_dim=sim_dim, temperature=temperature, **more)
        width, self.temperature = self.config["width"], temperature
        self.read_word, self.read_whole = linear(width, sim_dim), linear(width, sim_dim)

    def local_vectors(self, regions: Tensor, words: Tensor, shapes: list) -> Tensor:
        look = scaled_look(regions, words, shapes, self.temperature)
        return compare_words(regions, words, look, self.read_word)

    def tiles(self, images: Images, texts: Texts) -> Iterator[Tile]:
        """Every picture with every sentence, some at a time; in training all at once."""
        sim_dim = self.read_word.out_features
        for index, regions, columns in in_parts(images, texts, sim_dim, self.training):
            captions, words, shapes = columns
            local = by_shape(self.local_vectors(regions, words, shapes), shapes)
            wholes = images.pooled[index][:, None], texts.pooled[torch.cat(captions)]
            whole = compare(*wholes, self.read_whole)[:, :, None]
            whole = whole.split([n for _, n in shapes], dim=1)
            for which, *nodes in zip(captions, whole, local, strict=True):
                yield Tile(index, which, torch.cat(nodes, dim=2))

    def pair_tiles(self, images: Images, texts: Texts) -> Iterator[Tile]:
        for group, other in pack_pairs(images, texts):
            index, shapes = group.index, [(other.vectors.shape[1], 1)]
            local = self.local_vectors(group.vectors, other.vectors, shapes)
            wholes = images.pooled[index], texts.pooled[index]
            whole = compare(*wholes, self.read_whole)[:, None]
            yield Tile(index[:1], index, torch.cat([whole, local], dim=1)[None])

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        """Words look at regions: the level below the similarity vectors."""
        look = partial(attend, first_norm=FIRST_NORM, temperature=self.temperature)
        return {"t2i": pair_attention(images, texts, look)}


# cell public-names
HEADS = ("SAF", "SGR")
PUBLIC_ROUND = (
    ("graph_query_w", "query"),
    ("graph_key_w", "key"),
    ("sim_graph_w", "out"),
)
PUBLIC_PARTS = {
    "img_enc.fc": "region_proj",
    "txt_enc.embed": "word_embedding",
    "txt_enc.cap_rnn": "gru",
    "sim_enc.v_global_w.embedding_local.0": "one_image.each",
    "sim_enc.v_global_w.embedding_local.1": "one_image.each_norm",
    "sim_enc.v_global_w.embedding_global.0": "one_image.mean",
    "sim_enc.v_global_w.embedding_global.1": "one_image.mean_norm",
    "sim_enc.v_global_w.embedding_common.0": "one_image.weigh",
    "sim_enc.t_global_w.embedding_local.0": "one_text.each",
    "sim_enc.t_global_w.embedding_global.0": "one_text.mean",
    "sim_enc.t_global_w.embedding_common.0": "one_text.weigh",
    "sim_enc.sim_tranloc_w": "read_word",
    "sim_enc.sim_tranglo_w": "read_whole",
    "sim_enc.sim_eval_w": "judge",
    "sim_enc.SAF_module.attn_sim_w": "head.gate",
    "sim_enc.SAF_module.bn": "head.norm",
} | {
    f"sim_enc.SGR_module.{step}.{theirs}": f"head.steps.{step}.{ours}"
    for step in range(16)  # as many rounds as anyone may have trained
    for theirs, ours in PUBLIC_ROUND
}


# cell sgraf-class
class SGRAF(PairNodes):
    """The nodes of a pair and a head that reads them. Sizes: as ``WholesAndParts``."""

    PUBLIC_NAMES: ClassVar[dict[str, str]] = PUBLIC_PARTS

    def __init__(self, *sizes: int, head: str = "SAF", steps: int = 3, **more: Any):
        if head not in HEADS:
            raise input_error("head", repr(head), f"one of {', '.join(HEADS)}")
        super().__init__(*sizes, head=head, steps=steps, **more)
        sim_dim, by_caption = self.config["sim_dim"], self.config["region_slots"] > 0
        self.head = SAF(sim_dim, by_caption) if head == "SAF" else SGR(sim_dim, steps)
        self.judge = linear(sim_dim, 1)

    def score(self, images: Images, texts: Texts) -> Scores:
        values, places = [], []
        with full_precision(images.local):
            for tile, vector in self.head(self.tiles(images, texts)):
                values.append(self.judge(vector).sigmoid().flatten())
                place = tile.images[:, None] * len(texts) + tile.captions
                places.append(place.flatten())
        order = torch.cat(places).argsort()
        return Scores.same(torch.cat(values)[order].view(len(images), len(texts)))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        with full_precision(images.local):
            read = list(self.head(self.pair_tiles(images, texts)))
            values = [self.judge(vector).sigmoid()[0, :, 0] for _, vector in read]
        order = torch.cat([tile.captions for tile, _ in read]).argsort()
        return Scores.same(torch.cat(values)[order])

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        return 64  # a score, its place and their order; the rest stays within a tile

    @classmethod
    def from_public(cls, state_dict: Mapping, options: Mapping) -> Self:
        return load_public(
            cls(**public_config(state_dict, options)), state_dict, cls.PUBLIC_NAMES
        )


# cell build
PUBLIC_OPTIONS = {
    "vocab_size": "vocabulary_size",
    "img_dim": "image_dim",
    "embed_size": "width",
    "word_dim": "word_dim",
    "num_layers": "layers",
    "bi_gru": "bidirectional",
    "sim_dim": "sim_dim",
    "module_name": "head",
    "sgr_step": "steps",
}
SLOTS = "sim_enc.v_global_w.embedding_local.1.weight"  # one number a region slot


def public_config(
    state_dict: Mapping[str, Tensor], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Our keywords for the options of the public command line, and for its weights."""
    needed = (*PUBLIC_OPTIONS, "no_imgnorm", "no_txtnorm")
    if missing := [name for name in needed if name not in options]:
        raise input_error(
            "public options", f"no {', '.join(missing)}", "all options of SGRAF"
        )
    if SLOTS not in state_dict:
        raise input_error("public weights", f"no {SLOTS}", "the weights of SGRAF")
    ours = {name: options[public] for public, name in PUBLIC_OPTIONS.items()}
    return ours | {
        "image_norm": not options["no_imgnorm"],
        "text_norm": not options["no_txtnorm"],
        "dropout": options.get("dropout", 0.4),  # fixed in the public code
        "region_slots": len(state_dict[SLOTS]),
    }


OWN = ("width", "word_dim", "head", "sim_dim", "steps", "temperature", "dropout")


def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> SGRAF:
    """The model that the parameters of this chapter describe."""
    chosen = {name: parameters[name] for name in (*OWN, "region_slots")}
    return SGRAF(vocabulary_size, image_dim, **chosen)


# cell plain
def filter_nodes(nodes: Tensor, saf: SAF) -> Tensor:
    """SAF as the paper writes it: nodes (i, k, s) to one vector (i, s). Evaluation only."""
    norm, gates = saf.norm, saf.gate(nodes)  # (i, k, 1)
    spread = (norm.running_var + norm.eps).sqrt()
    gates = ((gates - norm.running_mean) / spread * norm.weight + norm.bias).sigmoid()
    return unit((gates / (gates.sum(dim=1, keepdim=True) + EPS) * nodes).sum(dim=1))


def reason(nodes: Tensor, sgr: SGR) -> Tensor:
    """SGR as the paper writes it: every node asks every node in every round."""
    for step in sgr.steps:
        edges = (step.query(nodes) @ step.key(nodes).mT).softmax(dim=-1)  # (i, k, k)
        nodes = step.out(edges @ nodes).relu()
    return nodes[:, 0]


def sgraf_by_loop(model: "SGRAF", images: Images, texts: Texts) -> Tensor:
    """Scores (i, c), one caption at a time, every vector built; no region masks."""
    columns = []
    for words, mask, whole in zip(texts.local, texts.mask, texts.pooled, strict=True):
        repeated = words[mask].expand(len(images), -1, -1)  # (i, w, d)
        keys, queries = images.local, repeated
        affinity = keys @ queries.mT  # (i, k, q)
        shapes = [(queries.shape[1], 1)]
        weights = attend(affinity, shapes, FIRST_NORM, model.temperature)
        attended = weights.mT @ keys  # (i, q, d)
        local = compare(unit(attended), queries, model.read_word)
        whole = compare(images.pooled, whole, model.read_whole)
        nodes = torch.cat([whole[:, None], local], dim=1)  # (i, 1 + w, s)
        summary = filter_nodes if isinstance(model.head, SAF) else reason
        columns.append(model.judge(summary(nodes, model.head)).sigmoid())
    return torch.cat(columns, dim=1)


# cell public-values
def public_values(model: SGRAF, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Our values for what a golden case of the public code holds under ``mid.*``."""
    image_batch, text_batch = batches(arrays)
    images, texts = model.encode_images(image_batch), model.encode_texts(text_batch)
    values = {
        "mid.img_emb": images.local,
        "mid.words": texts.local,
        "mid.img_selfattn": model.one_image.weights(images.local, images.mask),
        "mid.img_glo": images.pooled,
        "mid.cap_glo": texts.pooled,
    }
    if "in.probe_cap" in arrays:
        probe = int(arrays["in.probe_cap"])
        values |= probe_values(model, images, texts[probe : probe + 1])
    return {name: value for name, value in values.items() if name in arrays}


def probe_values(model: SGRAF, images: Images, text: Texts) -> dict[str, Tensor]:
    """One caption with every image, layer by layer."""
    words = text.local[text.mask]
    repeated = text[torch.zeros(len(images), dtype=torch.long)]
    weights = model.attention(images, repeated)["t2i"].weights[:, : len(words)]
    shapes = [(len(words), 1)]
    look = scaled_look(images.local, words, shapes, model.temperature)
    (tile,) = model.tiles(images, text)
    ((_, vector),) = model.head([tile])
    values = {
        "mid.probe_attn": weights,
        "mid.probe_context": look.mT @ images.local,
        "mid.probe_sim_emb": tile.nodes[:, 0],
        "mid.probe_vec": vector[:, 0],
    }
    if isinstance(model.head, SAF):
        return values | {"mid.probe_saf_attn": model.head.weights([tile])[0][:, 0]}
    nodes = tile.nodes[:, 0]
    for number, step in enumerate(model.head.steps):
        maps = step.multiplied()
        values[f"mid.probe_edge{number}"] = step.edges(nodes, nodes, maps)
        nodes = values[f"mid.probe_nodes{number}"] = step(nodes, nodes, maps)
    return values

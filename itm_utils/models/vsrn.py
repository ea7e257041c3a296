# Generated from notebooks/05_vsrn.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/05_vsrn.ipynb exports."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itm_utils.data.vocabulary import END, SPECIAL
from itm_utils.errors import input_error
from itm_utils.matcher import (
    ImageBatch,
    Images,
    Matcher,
    PairBatch,
    TextBatch,
    Texts,
    length_mask,
)
from itm_utils.models.vsepp import (
    GRUTextEncoder,
    GlobalEmbeddingMixin,
    HingeTriplet,
    MEASURES,
    l2_normalize,
)
from itm_utils.training import Stage, train_config


# cell relations
def relations(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Affinity (i, r, r) of every region (row) with every other (column); 0 for padding.

    queries, keys: (i, r, d). mask: (i, r). Divided by the number of regions; no softmax.
    """
    affinity = torch.einsum("iqd,ikd->iqk", queries, keys)
    count = mask.sum(dim=1).to(affinity.dtype)[:, None, None]
    return affinity.masked_fill(~mask[:, None, :], 0) / count


# cell apply-masked
def real_rows(mask: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Positions of the real regions among all i * r; None if there is no padding.

    lengths: (i,) on the CPU. Without them the mask is asked, and a GPU waited for.
    """
    real = mask if lengths is None else length_mask(lengths, mask.shape[1])
    if real.all():
        return None
    return real.flatten().nonzero()[:, 0].to(mask.device, non_blocking=True)


def apply_masked(
    layer: Callable[[Tensor], Tensor],
    x: Tensor,
    mask: Tensor,
    lengths: Tensor | None = None,
) -> Tensor:
    """Apply a layer to the real rows of (i, r, d) only; padding becomes zero."""
    rows, flat = real_rows(mask, lengths), x.flatten(0, 1)
    if rows is None:
        return layer(flat).view_as(x)
    changed = layer(flat.index_select(0, rows))
    return changed.new_zeros(flat.shape).index_copy(0, rows, changed).view_as(x)


# cell reasoning-step
class ReasoningStep(nn.Module):
    """Graph convolution over the regions of an image, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)  # messages
        self.out_proj = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        nn.init.zeros_(self.norm.weight)  # at initialisation a step is the identity

    def relations(self, regions: Tensor, mask: Tensor) -> Tensor:
        """(i, r, r)"""
        return relations(self.q_proj(regions), self.k_proj(regions), mask)

    def forward(
        self, regions: Tensor, mask: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """(i, r, d) to (i, r, d)"""
        messages = self.relations(regions, mask) @ self.v_proj(regions)
        return regions + apply_masked(self.norm, self.out_proj(messages), mask, lengths)


# cell region-norm
NORM_AXES = ("width", "regions")
ARCHITECTURES = ("coco", "f30k")
CHOICES = {"architecture": ARCHITECTURES, "norm_axis": NORM_AXES, "measure": MEASURES}


def normalize_regions(regions: Tensor, norm_axis: str) -> Tensor:
    """L2-normalise (i, r, d) along one axis. Padding is zero, and stays zero.

    width: every region has unit norm.
    regions: every entry d has, over the regions of its image; so does the public code.
    """
    if norm_axis == "width":
        return l2_normalize(regions)
    return l2_normalize(regions.mT).mT


# cell reason
def check_choices(**given: str) -> None:
    """Refuse a value that is not among those of a choice."""
    for name, value in given.items():
        if value not in CHOICES[name]:
            raise input_error(name, repr(value), f"one of {', '.join(CHOICES[name])}")


class RegionReasoning(nn.Module):
    """Project the regions, then reason over them: some graph convolutions in a row.

    architecture: "coco" normalises before the first step as well, "f30k" does not.
    """

    def __init__(
        self, image_dim: int, width: int, steps: int, architecture: str, norm_axis: str
    ) -> None:
        super().__init__()
        self.architecture, self.norm_axis = architecture, norm_axis
        self.region_proj = nn.Linear(image_dim, width)
        self.steps = nn.ModuleList(ReasoningStep(width) for _ in range(steps))

    def project(self, batch: ImageBatch) -> Tensor:
        """Regions before the first step (i, r, d); zero at padding."""
        counts = batch.mask.sum(dim=1) if batch.lengths is None else batch.lengths
        if not counts.all():
            raise input_error("mask", "an image without regions", "at least one each")
        regions = self.region_proj(batch.regions).masked_fill(~batch.mask[..., None], 0)
        if self.architecture == "f30k":
            return regions
        return normalize_regions(regions, self.norm_axis)

    def forward(self, batch: ImageBatch) -> Tensor:
        """Regions after all steps (i, r, d), normalised."""
        regions = self.project(batch)
        for step in self.steps:
            regions = step(regions, batch.mask, batch.lengths)
        return normalize_regions(regions, self.norm_axis)


# cell read-regions
def encode_regions(
    gru: nn.GRU, regions: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a GRU over the real regions, in their order.

    Returns the states (i, r, d) with their mask (i, r), padding last, and the state
    after the last real region (i, d).
    """
    order = (~mask).int().argsort(dim=1, stable=True)  # real regions first
    states = gru(regions.take_along_dim(order[..., None], dim=1))[0]
    last = mask.sum(dim=1) - 1
    rows = torch.arange(len(last), device=last.device)
    return states, mask.take_along_dim(order, dim=1), states[rows, last]


# cell targets
IGNORE_INDEX = -100  # a target without a loss, as in F.cross_entropy


def teacher_forcing(texts: TextBatch, max_len: int) -> tuple[Tensor, Tensor]:
    """Input tokens of the caption decoder and its targets: (b, t) each.

    A caption is truncated to ``max_len`` tokens, the last of which is then the end mark.
    One padding token after the end is a target as well, as in the public code.
    """
    steps = min(texts.words.shape[1], max_len - 1)
    position = torch.arange(steps + 1, device=texts.words.device)
    length = texts.lengths[:, None].to(position.device, non_blocking=True)
    tokens = F.pad(texts.words, (0, 1))[:, : steps + 1]
    tokens = tokens.masked_fill(position >= length, 0)
    truncated = (position == max_len - 1) & (length >= max_len)
    tokens = tokens.masked_fill(truncated, SPECIAL.index(END))
    targets = tokens[:, 1:].masked_fill(position[1:] > length, IGNORE_INDEX)
    return tokens[:, :-1], targets


# cell decoder-attention
class Memory(NamedTuple):
    """Encoded regions of an image, the same for all words of its caption.

    states: (b, r, d) of the encoder. padding: (b, r). keys: (b, r, d), the regions' half
    of the comparison. query_weight: (d, d), the weights of the other half.
    """

    states: Tensor
    padding: Tensor
    keys: Tensor
    query_weight: Tensor


def additive_weights(state: Tensor, memory: Memory, scorer: nn.Linear) -> Tensor:
    """Attention weights (b, r) of a decoder ``state`` (b, d) over the regions."""
    query = F.linear(state, memory.query_weight)[:, None]  # (b, 1, d)
    logits = scorer(torch.tanh(memory.keys + query))[..., 0]  # (b, r)
    return logits.masked_fill(memory.padding, -torch.inf).softmax(dim=1)


# cell caption-writer
class CaptionDecoder(nn.Module):
    """Encode the regions of an image, then decode a caption with additive attention."""

    def __init__(
        self, vocabulary: int, width: int, hidden: int, word_dim: int, dropout: float
    ) -> None:
        super().__init__()
        self.input_proj = nn.Linear(width, hidden)
        self.encoder = nn.GRU(hidden, hidden, batch_first=True)
        self.word_embedding = nn.Embedding(vocabulary, word_dim)
        self.attention_proj = nn.Linear(2 * hidden, hidden)
        self.attention_score = nn.Linear(hidden, 1, bias=False)
        self.decoder = nn.GRUCell(word_dim + hidden, hidden)
        self.out_proj = nn.Linear(hidden, vocabulary)
        self.dropout = nn.Dropout(dropout)
        nn.init.xavier_normal_(self.input_proj.weight)
        nn.init.xavier_normal_(self.out_proj.weight)

    def encode(self, regions: Tensor, mask: Tensor) -> tuple[Tensor, Memory]:
        """Initial decoder state (b, d), and the memory that it attends to."""
        inputs = self.dropout(self.input_proj(regions))
        states, mask, last = encode_regions(self.encoder, inputs, mask)
        key_weight, query_weight = self.attention_proj.weight.chunk(2, dim=1)
        keys = F.linear(states, key_weight, self.attention_proj.bias)
        return last, Memory(states, ~mask, keys, query_weight)

    def step(self, words: Tensor, state: Tensor, memory: Memory) -> Tensor:
        """Next state (b, d) after embedded words (b, word_dim)."""
        weights = additive_weights(state, memory, self.attention_score)
        context = (weights[:, None] @ memory.states)[:, 0]  # (b, d)
        return self.decoder(self.dropout(torch.cat([words, context], dim=1)), state)

    def forward(self, regions: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Logits (b, t, vocabulary) of the token after each of ``tokens`` (b, t)."""
        state, memory = self.encode(regions, mask)
        states = []
        for words in self.word_embedding(tokens).unbind(dim=1):
            state = self.step(words, state, memory)
            states.append(state)
        return self.out_proj(torch.stack(states, dim=1))


# cell own-loss
def captioning_loss(
    decoder: CaptionDecoder, regions: Tensor, batch: PairBatch, max_len: int
) -> Tensor:
    """Cross-entropy of the true captions: a sum over words, a mean over pairs."""
    tokens, targets = teacher_forcing(batch.texts, max_len)
    logits = decoder(regions, batch.images.mask, tokens).flatten(0, 1)
    loss = F.cross_entropy(
        logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return loss / len(batch)


# cell vsrn
class VSRN(GlobalEmbeddingMixin, Matcher):
    """Region reasoning, a GRU over regions and one over words; trained to decode captions.

    architecture: "coco" normalises regions before reasoning; "f30k" does not, and has a
    batch norm after the GRU. caption_weight: 0 for no caption decoder.
    """

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        width: int = 2048,
        word_dim: int = 300,
        layers: int = 1,
        reasoning_steps: int = 4,
        architecture: str = "coco",
        norm_axis: str = "width",
        caption_weight: float = 1.0,
        caption_width: int = 512,
        caption_word_dim: int = 300,
        caption_dropout: float = 0.2,
        max_len: int = 60,
        measure: str = "cosine",
        image_norm: bool = True,
        absolute: bool = False,
    ) -> None:
        super().__init__()
        check_choices(architecture=architecture, norm_axis=norm_axis, measure=measure)
        self.measure, self.image_norm, self.absolute = measure, image_norm, absolute
        self.caption_weight, self.max_len = caption_weight, max_len
        self.reasoning = RegionReasoning(
            image_dim, width, reasoning_steps, architecture, norm_axis
        )
        self.region_gru = nn.GRU(width, width, batch_first=True)
        batch_norm = architecture == "f30k"
        self.gru_norm = nn.BatchNorm1d(width) if batch_norm else nn.Identity()
        self.text_encoder = GRUTextEncoder(vocabulary_size, word_dim, width, layers)
        sizes = (vocabulary_size, width, caption_width, caption_word_dim)
        decoder = CaptionDecoder(*sizes, caption_dropout) if caption_weight else None
        self.caption_decoder = decoder
        nn.init.xavier_uniform_(self.reasoning.region_proj.weight)
        nn.init.zeros_(self.reasoning.region_proj.bias)

    def encode_image_batches(self, batches: list[ImageBatch]) -> Images:
        """Embeddings (i, d); in training also the regions (i, r, d) after reasoning.

        Of several batches, joined: batch norms see each alone, the GRU reads all at once.
        """
        parts = [Images(self.reasoning(x), x.mask, lengths=x.lengths) for x in batches]
        joined, sizes = Images.cat(parts), [len(part) for part in parts]
        last = encode_regions(self.region_gru, joined.local, joined.mask)[2]
        pooled = torch.cat([self.gru_norm(part) for part in last.split(sizes)])  # (i, d)
        pooled = pooled.to(self.reasoning.region_proj.weight.dtype)
        pooled = l2_normalize(pooled) if self.image_norm else pooled
        pooled = pooled.abs() if self.absolute else pooled
        if not self.training:
            return Images(pooled=pooled)
        return Images(joined.local, joined.mask, pooled, lengths=joined.lengths)

    def encode_images(self, batch: ImageBatch) -> Images:
        """Encode one batch of images."""
        return self.encode_image_batches([batch])

    def encode_texts(self, batch: TextBatch) -> Texts:
        """Embeddings (c, d)."""
        dtype = self.reasoning.region_proj.weight.dtype
        pooled = l2_normalize(self.text_encoder(batch).to(dtype))  # (c, d)
        return Texts(pooled=pooled.abs() if self.absolute else pooled)

    def encode_text_batches(self, batches: list[TextBatch]) -> Texts:
        """Encode several batches in one pass: no batch norm reads captions."""
        return self.encode_texts(TextBatch.cat(batches))

    def extra_losses(
        self, images: Images, texts: Texts, batch: PairBatch
    ) -> dict[str, Tensor]:
        """The weighted captioning loss, if there is a caption decoder."""
        if self.caption_decoder is None:
            return {}
        regions = self.reasoning(batch.images) if images.local is None else images.local
        loss = captioning_loss(self.caption_decoder, regions, batch, self.max_len)
        return {"captioning": self.caption_weight * loss}


# cell build
SIZES = ("width", "word_dim", "reasoning_steps", "architecture", "norm_axis", "max_len")
CAPTIONING = ("caption_weight", "caption_width", "caption_word_dim", "caption_dropout")


def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> VSRN:
    """The model that the chapter's parameters describe."""
    options = {name: parameters[name] for name in (*SIZES, *CAPTIONING)}
    return VSRN(vocabulary_size, image_dim, **options)


def stages(parameters: Mapping[str, Any], model: VSRN) -> list[Stage]:
    """One training, with the triplet loss and the captioning loss of the model."""
    objective = HingeTriplet(
        parameters["margin"], warmup_epochs=parameters["warmup_epochs"]
    )
    return [Stage("train", model, objective, train_config(parameters))]

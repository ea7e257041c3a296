# Generated from notebooks/05_vsrn.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/05_vsrn.ipynb exports."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import torch
from itm_lab.parity.adapters import vsepp
from itm_lab.parity.comparison import (
    Table,
    batches,
    compare_metrics,
    load_public,
    our_name,
)
from torch import Tensor, nn
from torch.nn import functional as F

from itm_utils.data.vocabulary import END, SPECIAL, START
from itm_utils.errors import input_error
from itm_utils.matcher import (
    ImageBatch,
    Images,
    Matcher,
    PairBatch,
    Scores,
    TextBatch,
    Texts,
)
from itm_utils.metrics import ensemble
from itm_utils.models.vsepp import (
    GRUTextEncoder,
    GlobalEmbeddingMixin,
    MEASURES,
    hinge_loss,
    l2_normalize,
)


# cell relations
def relations(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """(i, r, r): what a region (row) takes from each other one (column); 0 for padding.

    queries, keys: (i, r, d). mask: (i, r). Divided by how many regions there are.
    """
    affinity = torch.einsum("iqd,ikd->iqk", queries, keys)
    count = mask.sum(dim=1).to(affinity.dtype)[:, None, None]
    return affinity.masked_fill(~mask[:, None, :], 0) / count


# cell reasoning-step
def on_regions(layer: Callable[[Tensor], Tensor], x: Tensor, mask: Tensor) -> Tensor:
    """Apply a layer to the real rows of (i, r, d) only; padding becomes zero."""
    if mask.is_meta or mask.all():  # nothing to leave out, or no numbers to tell
        return layer(x.flatten(0, 1)).view_as(x)
    changed = layer(x[mask])
    return changed.new_zeros(x.shape).index_put((mask,), changed)


class ReasoningStep(nn.Module):
    """Every region takes something from all others, and adds it to what it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.message = nn.Linear(width, width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        nn.init.zeros_(self.norm.weight)  # the step begins by changing nothing

    def relations(self, regions: Tensor, mask: Tensor) -> Tensor:
        """(i, r, r)"""
        return relations(self.query(regions), self.key(regions), mask)

    def forward(self, regions: Tensor, mask: Tensor) -> Tensor:
        """(i, r, d) to (i, r, d)"""
        taken = self.relations(regions, mask) @ self.message(regions)
        return regions + on_regions(self.norm, self.mix(taken), mask)


# cell read-regions
def read_regions(
    gru: nn.GRU, regions: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Read real regions one after the other, in their order.

    Returns the states (i, r, d) with their mask (i, r), padding last, and the state
    after the last real region (i, d).
    """
    order = (~mask).int().argsort(dim=1, stable=True)  # real ones first
    states = gru(regions.take_along_dim(order[..., None], dim=1))[0]
    last = mask.sum(dim=1) - 1
    rows = torch.arange(len(last), device=last.device)
    return states, mask.take_along_dim(order, dim=1), states[rows, last]


# cell region-norm
NORM_AXES = ("width", "regions")


def normalise(regions: Tensor, norm_axis: str) -> Tensor:
    """Scale (i, r, d) to length one. Padding is zero, and stays it.

    width: every region is a vector of length one.
    regions: every entry d is, over the regions of its picture; so does the public code.
    """
    return (
        l2_normalize(regions) if norm_axis == "width" else l2_normalize(regions.mT).mT
    )


# cell targets
NOT_ASKED = -100  # a target that costs nothing


def writing_task(texts: TextBatch, max_len: int) -> tuple[Tensor, Tensor]:
    """What the writer has read before each step, and what it should write: (b, t) each.

    A caption is cut after ``max_len`` tokens, the last of which is then the end mark.
    Writing one padding token after the end is asked for as well, as in the public code.
    """
    steps = min(texts.words.shape[1], max_len - 1)
    position = torch.arange(steps + 1, device=texts.words.device)
    length = texts.lengths[:, None]
    tokens = F.pad(texts.words, (0, 1))[:, : steps + 1].masked_fill(
        position >= length, 0
    )
    cut = (position == max_len - 1) & (length >= max_len)
    tokens = tokens.masked_fill(cut, SPECIAL.index(END))
    return tokens[:, :-1], tokens[:, 1:].masked_fill(position[1:] > length, NOT_ASKED)


# cell look-back
class Memory(NamedTuple):
    """What a writer keeps of a picture, the same for all words.

    states: (b, r, d) of its reader. padding: (b, r). keys: (b, r, d), the regions' half
    of the comparison. of_state: (d, d), the weights of the other half.
    """

    states: Tensor
    padding: Tensor
    keys: Tensor
    of_state: Tensor


def look_back(state: Tensor, memory: Memory, vote: nn.Linear) -> Tensor:
    """(b, d): a mean of the regions' states, weighted by the votes of ``state`` (b, d)."""
    asked = F.linear(state, memory.of_state)[:, None]
    votes = vote(torch.tanh(memory.keys + asked))[..., 0]  # (b, r)
    weights = votes.masked_fill(memory.padding, -torch.inf).softmax(dim=1)
    return (weights[:, None] @ memory.states)[:, 0]


# cell caption-writer
class CaptionDecoder(nn.Module):
    """Reads the regions of a picture, then writes a caption and looks back at every word."""

    def __init__(
        self, vocabulary: int, width: int, hidden: int, word_dim: int, dropout: float
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(width, hidden)
        self.text_encoder = nn.GRU(hidden, hidden, batch_first=True)
        self.word_embedding = nn.Embedding(vocabulary, word_dim)
        self.compare = nn.Linear(2 * hidden, hidden)
        self.vote = nn.Linear(hidden, 1, bias=False)
        self.writer = nn.GRUCell(word_dim + hidden, hidden)
        self.next_word = nn.Linear(hidden, vocabulary)
        self.dropout = nn.Dropout(dropout)
        nn.init.xavier_normal_(self.enter.weight)
        nn.init.xavier_normal_(self.next_word.weight)

    def read(self, regions: Tensor, mask: Tensor) -> tuple[Tensor, Memory]:
        """The first state (b, d), and what is the same for all words."""
        entered = self.dropout(self.enter(regions))
        states, mask, last = read_regions(self.text_encoder, entered, mask)
        of_regions, of_state = self.compare.weight.chunk(2, dim=1)
        keys = F.linear(states, of_regions, self.compare.bias)
        return last, Memory(states, ~mask, keys, of_state)

    def step(self, words: Tensor, state: Tensor, memory: Memory) -> Tensor:
        """Look at the regions, read the last word (b, word_dim), move on: (b, d)."""
        seen = look_back(state, memory, self.vote)
        return self.writer(self.dropout(torch.cat([words, seen], dim=1)), state)

    def forward(self, regions: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Logits (b, t, vocabulary) of the token after each of ``tokens`` (b, t)."""
        state, memory = self.read(regions, mask)
        written = []
        for words in self.word_embedding(tokens).unbind(dim=1):
            state = self.step(words, state, memory)
            written.append(state)
        return self.next_word(torch.stack(written, dim=1))


# cell own-loss
def captioning_loss(
    writer: CaptionDecoder, regions: Tensor, batch: PairBatch, max_len: int
) -> Tensor:
    """What the true captions cost the writer: a sum over words, a mean over pairs."""
    tokens, targets = writing_task(batch.texts, max_len)
    logits = writer(regions, batch.images.mask, tokens).flatten(0, 1)
    wanted = targets.flatten()
    loss = F.cross_entropy(logits, wanted, ignore_index=NOT_ASKED, reduction="sum")
    return loss / len(batch)


class CaptioningLoss:
    """The captioning loss, for a matcher with a ``writer`` that may be None."""

    def extra_losses(
        self, images: Images, texts: Texts, batch: PairBatch
    ) -> dict[str, Tensor]:
        if self.writer is None:
            return {}
        local = self.reason(batch.images) if images.local is None else images.local
        loss = captioning_loss(self.writer, local, batch, self.max_len)
        return {"captioning": self.caption_weight * loss}


# cell reason-and-read
class ReasonAndRead(GlobalEmbeddingMixin):
    """From regions and words to one vector each."""

    def mapped(self, batch: ImageBatch) -> Tensor:
        """(i, r, d): regions as they enter the reasoning; zero where there is none."""
        if not batch.mask.is_meta and not batch.mask.any(dim=1).all():
            raise input_error(
                "mask", "a picture without regions", "at least one in each"
            )
        regions = self.region_proj(batch.regions).masked_fill(~batch.mask[..., None], 0)
        return (
            normalise(regions, self.norm_axis)
            if self.architecture == "coco"
            else regions
        )

    def reason(self, batch: ImageBatch) -> Tensor:
        """(i, r, d): regions after all steps of reasoning, scaled."""
        regions = self.mapped(batch)
        for step in self.steps:
            regions = step(regions, batch.mask)
        return normalise(regions, self.norm_axis)

    def encode_images(self, batch: ImageBatch) -> Images:
        regions = self.reason(batch)
        last = read_regions(self.region_gru, regions, batch.mask)[2]
        pooled = self.last_norm(last).to(self.region_proj.weight.dtype)  # (i, d)
        pooled = l2_normalize(pooled) if self.image_norm else pooled
        pooled = pooled.abs() if self.absolute else pooled
        if not self.training:  # a vector a picture is all that search needs to keep
            return Images(pooled=pooled)
        return Images(pooled=pooled, local=regions, mask=batch.mask)

    def encode_texts(self, batch: TextBatch) -> Texts:
        pooled = self.text_encoder(batch).to(self.region_proj.weight.dtype)  # (c, d)
        pooled = l2_normalize(pooled)
        return Texts(pooled=pooled.abs() if self.absolute else pooled)


# cell public-names
STEPS = {"theta": "query", "phi": "key", "g": "message", "W.0": "mix", "W.1": "norm"}
WRITER_NAMES = {
    "encoder.vid2hid": "enter",
    "encoder.rnn": "text_encoder",
    "decoder.embedding": "word_embedding",
    "decoder.attention.linear1": "compare",
    "decoder.attention.linear2": "vote",
    "decoder.rnn.weight_ih_l0": "writer.weight_ih",
    "decoder.rnn.weight_hh_l0": "writer.weight_hh",
    "decoder.rnn.bias_ih_l0": "writer.bias_ih",
    "decoder.rnn.bias_hh_l0": "writer.bias_hh",
    "decoder.out": "next_word",
}
PUBLIC_NAMES = {
    "img_enc.fc": "region_proj",
    "img_enc.img_rnn": "region_gru",
    "img_enc.bn": "last_norm",
    "txt_enc.embed": "text_encoder.word_embedding",
    "txt_enc.rnn": "text_encoder.gru",
    **{
        f"img_enc.Rs_GCN_{n + 1}.{public}": f"steps.{n}.{STEPS[public]}"
        for n in (0, 1, 2, 3)
        for public in STEPS
    },
    **{
        f"caption_model.{name}": f"writer.{WRITER_NAMES[name]}" for name in WRITER_NAMES
    },
}


class FromPublic:
    """Builds a VSRN from published weights; 1x1 convolutions there are linear maps here."""

    @classmethod
    def from_public(cls, state_dict: Mapping[str, Tensor], options: Mapping) -> Self:
        writes = any(name.startswith("caption_model.") for name in state_dict)
        model = cls(**public_config(options), caption_weight=float(writes))
        flat = {k: v[..., 0] if v.dim() == 3 else v for k, v in state_dict.items()}
        return load_public(model, flat, cls.PUBLIC_NAMES)


# cell vsrn
class VSRN(FromPublic, CaptioningLoss, ReasonAndRead, Matcher):
    """Regions reason together, a GRU reads them to one vector, and a writer must tell.

    variant: "coco" scales regions before reasoning; "f30k" does not, and has a batch
    norm after the GRU. norm_axis: see ``normalise``. caption_weight: 0 for no writer.
    """

    PUBLIC_NAMES: ClassVar[dict[str, str]] = PUBLIC_NAMES

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
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(**given)
        check_choices(architecture=architecture, norm_axis=norm_axis, measure=measure)
        self.measure, self.image_norm, self.absolute = measure, image_norm, absolute
        self.architecture, self.norm_axis = architecture, norm_axis
        self.caption_weight, self.max_len = caption_weight, max_len
        self.region_proj = nn.Linear(image_dim, width)
        self.steps = nn.ModuleList(ReasoningStep(width) for _ in range(reasoning_steps))
        self.region_gru = nn.GRU(width, width, batch_first=True)
        self.last_norm = (
            nn.BatchNorm1d(width) if architecture == "f30k" else nn.Identity()
        )
        self.text_encoder = GRUTextEncoder(vocabulary_size, word_dim, width, layers)
        sizes = (width, caption_width, caption_word_dim, caption_dropout)
        self.writer = (
            CaptionDecoder(vocabulary_size, *sizes) if caption_weight else None
        )
        nn.init.xavier_uniform_(self.region_proj.weight)
        nn.init.zeros_(self.region_proj.bias)


# cell build
VARIANTS = ("coco", "f30k")
CHOICES = {"architecture": VARIANTS, "norm_axis": NORM_AXES, "measure": MEASURES}


def check_choices(**given: str) -> None:
    """Refuse what is not among the values of a choice, and name those that are."""
    for name, value in given.items():
        if value not in CHOICES[name]:
            raise input_error(name, repr(value), f"one of {', '.join(CHOICES[name])}")


def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> VSRN:
    """The model of a run, from the parameters of this chapter."""
    names = [
        "width",
        "word_dim",
        "reasoning_steps",
        "architecture",
        "norm_axis",
        "max_len",
    ]
    names += [f"caption_{what}" for what in ("weight", "width", "word_dim", "dropout")]
    return VSRN(
        vocabulary_size, image_dim, **{name: parameters[name] for name in names}
    )


# cell public-config
PUBLIC_OPTIONS = {
    "dim_hidden": "caption_width",
    "dim_word": "caption_word_dim",
    "input_dropout_p": "caption_dropout",
    "max_len": "max_len",
}
FLICKR = "f30k_precomp"  # the dataset whose name changes the public model


def public_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The public options that shape the model, as arguments of ours."""
    needed = (*PUBLIC_OPTIONS, "data_name", "bidirectional", "rnn_type")
    if missing := [name for name in needed if name not in options]:
        raise input_error("public options", f"no {', '.join(missing)}", "all of VSRN's")
    if options["bidirectional"] or options["rnn_type"].lower() != "gru":
        raise input_error(
            "public options", "another captioner", "a GRU that reads one way"
        )
    ours = vsepp.config(options)
    ours |= {name: options[public] for public, name in PUBLIC_OPTIONS.items()}
    architecture = "f30k" if options["data_name"] == FLICKR else "coco"
    return ours | {"architecture": architecture, "norm_axis": "regions"}


def public_values(model: VSRN, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Our values for the intermediate arrays of a golden case."""
    images, texts = batches(arrays)
    regions = model.mapped(images)
    first = model.steps[0].relations(regions, images.mask)
    values = {"mid.fc": model.region_proj(images.regions), "mid.gcn_input": regions}
    values["mid.affinity_gcn1_img0"] = first[0]
    for n, step in enumerate(model.steps):
        values[f"mid.gcn{n + 1}"] = regions = step(regions, images.mask)
    values["mid.regions"] = regions = normalise(regions, model.norm_axis)
    values["mid.img_gru_last"] = read_regions(model.region_gru, regions, images.mask)[2]
    values["mid.words"] = model.text_encoder.states(texts) * texts.mask[..., None]
    values["out.img_emb"] = model.encode_images(images).pooled
    values["out.cap_emb"] = model.encode_texts(texts).pooled
    if model.writer is not None and "in.caption_labels" in arrays:
        said = torch.from_numpy(arrays["in.caption_labels"])[:1, : model.max_len - 1]
        logits = model.writer(regions[:1], images.mask[:1], said)
        values["mid.regions_caption_logprobs0"] = logits[0].log_softmax(dim=-1)
    return {name: value for name, value in values.items() if name in arrays}


# cell compare-losses
def paired_batch(arrays: Mapping[str, Any]) -> PairBatch:
    """The matched pairs of a golden case."""
    images, texts = batches(arrays)
    return PairBatch(images, texts[torch.from_numpy(arrays["in.pair_cap"])])


def compare_losses(
    table: Table, model: VSRN, margin: float, arrays: Mapping[str, Any], prefix: str
) -> None:
    """Ranking loss, captioning loss, and the gradients of their sum."""
    batch = paired_batch(arrays)
    images = model.encode_images(batch.images)
    texts = model.encode_texts(batch.texts)
    scores = model.score(images, texts)
    losses = {
        kind: hinge_loss(scores, margin, kind == "hard") for kind in ("hard", "sum")
    }
    losses["caption"] = sum(model.extra_losses(images, texts, batch).values())
    total = losses["hard"] + losses["caption"]
    named = {f"{prefix}loss_{kind}": loss for kind, loss in losses.items()}
    for key, loss in (named | {f"{prefix}total_loss": total}).items():
        if key in arrays:
            table.add("losses", key, loss, arrays[key], relative=True)
    model.zero_grad()
    total.backward()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for key in arrays:
        if key.startswith(f"{prefix}grad_total."):
            name = our_name(VSRN, key.removeprefix(f"{prefix}grad_total."))
            table.add(
                "gradients", key, parameters[name].grad, arrays[key], relative=True
            )
        elif key.startswith(f"{prefix}buffer."):
            name = our_name(VSRN, key.removeprefix(f"{prefix}buffer."))
            table.add("values", key, buffers[name], arrays[key])


# cell compare-case
def compare_clipping(table: Table, model: VSRN, arrays: Mapping[str, Any]) -> None:
    """The public optimiser lists the captioner twice, and so its clip norm counts it twice."""
    squares = {n: p.grad.square().sum() for n, p in model.named_parameters()}
    once = sum(squares.values())
    again = sum(
        square for name, square in squares.items() if name.startswith("writer.")
    )
    for name, total in (("unique", once), ("official", once + again)):
        key = f"out.clip_norm_{name}"
        table.add("gradients", key, total.sqrt(), arrays[key], relative=True)


def compare_ensemble(table: Table, arrays: Mapping[str, Any]) -> None:
    """Recalls of one model, and of the mean of two models' scores, from their vectors."""
    sims = [
        arrays[f"in.img_embs_{x}"].astype(float)
        @ arrays[f"in.cap_embs_{x}"].astype(float).T
        for x in "ab"
    ]
    both = ensemble([Scores.same(torch.from_numpy(s)) for s in sims]).i2t.numpy()
    for prefix, scores in (("out.", sims[0]), ("out.ens_", both)):
        expected = {f"out.{way}": arrays[f"{prefix}{way}"] for way in ("i2t", "t2i")}
        compare_metrics(table, {"in.sims": scores} | expected)


def compare_case(table: Table, about: Mapping, arrays: Mapping[str, Any]) -> bool:
    """What only VSRN's golden cases hold; true where nothing else is left to compare."""
    if "in.img_embs_a" in arrays:
        compare_ensemble(table, arrays)
        return True
    weights = {k[2:]: torch.from_numpy(v) for k, v in arrays.items() if k[:2] == "w."}
    model = VSRN.from_public(weights, about["options"]).eval()
    margin = about["options"]["margin"]
    compare_losses(table, model, margin, arrays, "out.")
    if "out.clip_norm_unique" in arrays:
        compare_clipping(table, model, arrays)
    compare_losses(table, model.train(), margin, arrays, "out.train.")
    return False


# cell write-greedily
@torch.no_grad()
def write_greedily(
    writer: CaptionDecoder, regions: Tensor, mask: Tensor, max_len: int
) -> Tensor:
    """The likeliest next word, again and again: (b, max_len) token ids."""
    state, memory = writer.read(regions, mask)
    token = torch.full(mask.shape[:1], SPECIAL.index(START), device=mask.device)
    written = []
    for _ in range(max_len):
        state = writer.step(writer.word_embedding(token), state, memory)
        token = writer.next_word(state).argmax(dim=-1)
        written.append(token)
    return torch.stack(written, dim=1)

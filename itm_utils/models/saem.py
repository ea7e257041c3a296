# Generated from notebooks/06_saem.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/06_saem.ipynb exports."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from itm_lab.parity.comparison import Table, batches, load_public, our_name
from torch import Tensor, nn

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
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.scan import read_words
from itm_utils.models.vsepp import GlobalEmbeddingMixin, hinge_loss, l2_normalize


# cell multi-head
class MultiHeadAttention(nn.Module):
    """Attention with several heads: every query collects what it needs from the keys."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise input_error(
                "heads", str(heads), f"a number that divides the width {width}"
            )
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def cut(self, vectors: Tensor) -> Tensor:
        """(b, k, d) to (b, h, k, d/h): neighbouring numbers make a head."""
        return vectors.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(
        self, queries: Tensor, context: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What queries (b, q, d) find in context (b, k, d), and weights (b, h, q, k).

        mask: (b, k), True where there is a key.
        """
        q, k = self.cut(self.q_proj(queries)), self.cut(self.k_proj(context))
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        nothing = torch.finfo(logits.dtype).min
        logits = logits.masked_fill(~mask[:, None, None, :], nothing)
        weights = logits.softmax(dim=-1)
        found = self.dropout(weights) @ self.cut(self.v_proj(context))
        return self.out_proj(found.transpose(1, 2).flatten(2)), weights


# cell transformer-layer
class TransformerLayer(nn.Module):
    """Look at each other, then think alone; both with a shortcut and a norm behind it."""

    def __init__(
        self,
        width: int,
        heads: int,
        feed_forward: int,
        dropout: float = 0.1,
        activation: str = "gelu",
        eps: float = 1e-12,
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, heads, dropout)
        self.linear1 = nn.Linear(width, feed_forward)
        self.linear2 = nn.Linear(feed_forward, width)
        self.attn_norm = nn.LayerNorm(width, eps=eps)
        self.ffn_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)
        self.activation = {"gelu": nn.functional.gelu, "relu": torch.relu}[activation]

    def forward(self, vectors: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(b, k, d) and mask (b, k) to new vectors (b, k, d) and weights (b, h, k, k)."""
        found, weights = self.attention(vectors, vectors, mask)
        return self.ffn(vectors, found), weights

    def ffn(self, vectors: Tensor, found: Tensor) -> Tensor:
        """What follows the look: shortcut, norm, think, shortcut, norm; all (…, k, d)."""
        vectors = self.attn_norm(vectors + self.dropout(found))
        thought = self.linear2(self.activation(self.linear1(vectors)))
        return self.ffn_norm(vectors + self.dropout(thought))


# cell text-cnn
WINDOWS = (1, 2, 3)  # tokens that a filter sees at once


class TextCNN(nn.Module):
    """Filters slide over the tokens; the best answer of each, anywhere, is kept."""

    def __init__(self, token_dim: int, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(token_dim, channels, window) for window in WINDOWS
        )

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens (c, w, d) with mask (c, w) to (c, 3 * channels).

        A window counts if it holds real tokens only; a caption shorter than the
        window is filled up with zeros.
        """
        lengths = mask.sum(dim=1)
        tokens = torch.where(mask[..., None], tokens, 0).mT  # (c, d, w)
        best = []
        for conv, window in zip(self.convs, WINDOWS, strict=True):
            missing = max(0, window - tokens.shape[2])
            answers = conv(nn.functional.pad(tokens, (0, missing))).relu()
            places = length_mask((lengths - window + 1).clamp(min=1), answers.shape[2])
            # no answer is below zero, so zero stands for "nowhere"
            best.append((answers * places[:, None, :]).amax(dim=2))
        return torch.cat(best, dim=1)


# cell angular-loss
def angular_costs(anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """4 (a + p) n - 4 a p of every anchor with every negative: (b, n), own partner -inf.

    All are (b, d); anchor b, positive b and negative b belong together.
    """
    right = (anchors * positives).sum(dim=1, keepdim=True)  # (b, 1)
    costs = 4 * (anchors + positives) @ negatives.T - 4 * right
    own = torch.eye(len(costs), dtype=torch.bool, device=costs.device)
    return costs.masked_fill(own, -math.inf)


def angular_loss(images: Tensor, texts: Tensor, soft: bool = False) -> Tensor:
    """Angular loss of matched unit vectors (b, d) at 45 degrees, both ways.

    The hardest negative of every anchor, summed; soft: all of them, averaged.
    """
    loss = images.new_zeros(())
    for anchors, positives in ((images, texts), (texts, images)):
        costs = angular_costs(anchors, positives, positives)
        if soft:
            nobody = costs.new_zeros(len(costs), 1)
            loss = loss + torch.cat([nobody, costs], dim=1).logsumexp(dim=1).mean()
        else:
            loss = loss + nn.functional.softplus(costs.amax(dim=1)).sum()
    return loss


# cell two-sides
class TwoSides(GlobalEmbeddingMixin):
    """A picture becomes one vector and a caption another; they do not meet here."""

    def think(self, batch: ImageBatch) -> tuple[Tensor, list[Tensor]]:
        """Regions (i, r, d) that know each other, and each layer's weights (i, h, r, r)."""
        regions, looks = self.region_proj(batch.regions), []
        for layer in self.layers:
            regions, weights = layer(regions, batch.mask)
            looks.append(weights)
        return regions, looks

    def encode_images(self, batch: ImageBatch) -> Images:
        regions, _ = self.think(batch)
        return Images(pooled=l2_normalize(masked_mean(regions, batch.mask)))

    def tokens(self, batch: TextBatch) -> Tensor:
        """(c, w, token_dim): states of the frozen text encoder."""
        if batch.features is not None:
            return batch.features
        if self.bert is None:
            hint = "Open the captions with itm_utils.data.text_encoder.bert_captions."
            raise input_error("captions", "word ids", "states of a text encoder", hint)
        return self.bert(batch.words, batch.mask)[-1]

    def read(self, tokens: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
        """Tokens (c, w, d) to one vector a caption, before the last map."""
        if self.text_encoder == "cnn":
            return self.text_cnn(tokens, mask)
        if self.text_encoder == "rnn":
            return masked_mean(read_words(self.gru, tokens, lengths), mask)
        return masked_mean(self.text_proj(tokens), mask)

    def encode_texts(self, batch: TextBatch) -> Texts:
        mask = torch.ones_like(batch.mask) if self.public_padding else batch.mask
        read = self.read(self.tokens(batch), batch.lengths, mask)
        return Texts(pooled=l2_normalize(self.text_proj(self.dropout(read))))


# cell own-terms
class TwoTerms:
    """The angular loss, which fades, and a penalty on the image side's matrices."""

    def set_epoch(self, epoch: int) -> None:
        """The angular loss fades: a tenth every 5 epochs, nothing from epoch 21 on."""
        self.angular_now = (
            self.angular_weight * 0.1 ** (epoch // 5) if epoch < 21 else 0.0
        )

    def weight_norms(self) -> Tensor:
        """Sum of the lengths of the image side's weight matrices."""
        sides = (self.region_proj, self.layers)
        matrices = [p for side in sides for p in side.parameters() if p.dim() == 2]
        return torch.stack(
            [torch.linalg.vector_norm(matrix) for matrix in matrices]
        ).sum()

    def extra_losses(
        self, images: Images, texts: Texts, batch: PairBatch
    ) -> dict[str, Tensor]:
        losses = {}
        if self.angular_now:
            angular_weight = angular_loss(images.pooled, texts.pooled)
            losses["angular_weight"] = self.angular_now * angular_weight
        if self.weight_penalty:
            losses["weights"] = self.weight_penalty * self.weight_norms()
        return losses


# cell public-names
LAYER_NAMES = {
    "attention.self.query": "attention.q_proj",
    "attention.self.key": "attention.k_proj",
    "attention.self.value": "attention.v_proj",
    "attention.output.dense": "attention.out_proj",
    "attention.output.LayerNorm.gamma": "attn_norm.weight",
    "attention.output.LayerNorm.beta": "attn_norm.bias",
    "intermediate.dense": "linear1",
    "output.dense": "linear2",
    "output.LayerNorm.gamma": "ffn_norm.weight",
    "output.LayerNorm.beta": "ffn_norm.bias",
}
TABLE_NAMES = {
    "word_embeddings": "word_embedding",
    "position_embeddings": "position_table",
    "token_type_embeddings": "kind_table",
    "LayerNorm.gamma": "norm.weight",
    "LayerNorm.beta": "norm.bias",
}
PUBLIC_LAYERS = {"img_enc.layer": "layers.0"} | {
    f"txt_enc.bert.encoder.layer.{n}": f"bert.layers.{n}" for n in range(24)
}  # BERT base has 12 layers, BERT large 24
PUBLIC_NAMES = {
    "img_enc.mapping": "region_proj",
    "txt_enc.mapping": "text_proj",
    "txt_enc.convs1": "text_cnn.convs",
    "txt_enc.rnn": "gru",
    **{f"txt_enc.bert.embeddings.{p}": f"bert.{TABLE_NAMES[p]}" for p in TABLE_NAMES},
    **{
        f"{layer}.{p}": f"{PUBLIC_LAYERS[layer]}.{LAYER_NAMES[p]}"
        for layer in PUBLIC_LAYERS
        for p in LAYER_NAMES
    },
}


# cell from-public
def our_layout(weight: Tensor) -> Tensor:
    """The public code slides a picture filter (n, 1, w, d); ours is (n, d, w)."""
    return weight[:, 0].mT if weight.dim() == 4 else weight


class FromPublic:
    """Builds a SAEM from published weights."""

    @classmethod
    def from_public(
        cls, state_dict: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> Self:
        """options: those of the command line, and the two files it reads, trans_cfg and bert_config."""
        weights = {
            name: our_layout(value)
            for name, value in state_dict.items()
            if ".bert.pooler." not in name  # computed in public, and used nowhere
        }
        return load_public(cls(**public_config(options)), weights, cls.PUBLIC_NAMES)


# cell saem-class
class SAEM(FromPublic, TwoTerms, TwoSides, Matcher):
    """Regions that look at each other, BERT and a text CNN: one vector each.

    vocabulary_size: of the BERT inside, if there is one; else not used, because
    captions come as token states of width token_dim.
    """

    PUBLIC_NAMES: ClassVar[dict[str, str]] = PUBLIC_NAMES

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        width: int = 256,
        token_dim: int = 768,
        layers: int = 1,
        heads: int = 0,
        feed_forward: int = 2048,
        channels: int = 512,
        dropout: float = 0.1,
        angular_weight: float = 0.5,
        weight_penalty: float = 0.01,
        public_padding: bool = False,
        reader: str = "cnn",
        gru: Mapping[str, Any] | None = None,
        bert: Mapping[str, int] | None = None,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(**given)
        self.angular_weight, self.weight_penalty = angular_weight, weight_penalty
        self.public_padding, self.text_encoder = public_padding, reader
        self.region_proj = nn.Linear(image_dim, width)
        heads = heads or max(1, width // 16)  # as published: 16 heads of 16
        sizes = (width, heads, feed_forward, dropout)
        self.layers = nn.ModuleList(TransformerLayer(*sizes) for _ in range(layers))
        self.bert = Bert(vocabulary_size, token_dim, **bert) if bert else None
        self.text_cnn = TextCNN(token_dim, channels) if reader == "cnn" else None
        self.gru = (
            nn.GRU(token_dim, batch_first=True, **gru) if reader == "rnn" else None
        )
        self.text_proj = nn.Linear(read_width(given), width)
        self.dropout = nn.Dropout(dropout)
        self.set_epoch(0)


# cell build
READERS = ("cnn", "pooling", "rnn")
PARTS = ("width", "token_dim", "layers", "feed_forward", "channels", "dropout")
TERMS = ("angular_weight", "weight_penalty", "public_padding")


def read_width(given: Mapping[str, Any]) -> int:
    """Numbers that a caption has before the last map, by the reader that is given."""
    if (reader := given["reader"]) not in READERS:
        raise input_error("reader", repr(reader), f"one of {', '.join(READERS)}")
    if reader == "rnn":
        return given["gru"]["hidden_size"]
    return len(WINDOWS) * given["channels"] if reader == "cnn" else given["token_dim"]


def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> SAEM:
    """The model that the chapter's parameters describe."""
    chosen = {name: parameters[name] for name in (*PARTS, *TERMS)}
    return SAEM(vocabulary_size, image_dim, **chosen)


# cell bert
class Bert(nn.Module):
    """BERT, frozen: three tables, a norm, and the layer of this chapter many times."""

    def __init__(
        self,
        vocabulary_size: int,
        width: int,
        layers: int,
        heads: int,
        feed_forward: int,
        positions: int,
    ) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary_size, width)
        self.position_table = nn.Embedding(positions, width)
        self.kind_table = nn.Embedding(2, width)  # first or second sentence
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(
            TransformerLayer(width, heads, feed_forward, dropout=0.0)
            for _ in range(layers)
        )
        self.requires_grad_(False)

    def forward(self, words: Tensor, mask: Tensor) -> list[Tensor]:
        """Piece ids (c, w) with mask (c, w) to the states (c, w, d) after each layer."""
        places = torch.arange(words.shape[1], device=words.device)
        states = self.word_embedding(words) + self.position_table(places)
        states = self.norm(states + self.kind_table.weight[0])
        after = []
        for layer in self.layers:
            states, _ = layer(states, mask)
            after.append(states)
        return after


# cell public-config
def public_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The public options and the two files they name, as arguments of ours."""
    needed = ("img_dim", "final_dims", "txt_stru", "txt_out_channel")
    for name in (*needed, "trans_cfg", "bert_config"):
        if name not in options:
            raise input_error(
                "public options", f"no {name}", "all that shape the model"
            )
    unit, text = options["trans_cfg"], options["bert_config"]
    if not (isinstance(unit, Mapping) and isinstance(text, Mapping)):
        found, expected = "the name of a file", "its content, as a mapping"
        raise input_error("trans_cfg, bert_config", found, expected)
    if unit["hidden_size"] != options["final_dims"]:
        found = f"{unit['hidden_size']} and {options['final_dims']}"
        raise input_error("hidden_size, final_dims", found, "the same number")
    config = {
        "vocabulary_size": text["vocab_size"],
        "image_dim": options["img_dim"],
        "width": options["final_dims"],
        "token_dim": text["hidden_size"],
        "heads": unit["num_attention_heads"],
        "feed_forward": unit["intermediate_size"],
        "channels": options["txt_out_channel"],
        "dropout": unit["hidden_dropout_prob"],
        "public_padding": True,
        "reader": options["txt_stru"],
        "bert": {
            "layers": text["num_hidden_layers"],
            "heads": text["num_attention_heads"],
            "feed_forward": text["intermediate_size"],
            "positions": text["max_position_embeddings"],
        },
    }
    if config["reader"] == "rnn":
        config["gru"] = {
            "hidden_size": options["embed_size"],
            "num_layers": options["num_layers"],
            "bidirectional": options["bi_gru"],
        }
    return config


# cell public-values
def public_values(model: SAEM, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Our values for what a golden case of the public code holds under ``mid.*``."""
    images, texts = batches(arrays)
    regions, looks = model.think(images)
    states = model.bert(texts.words, texts.mask)
    everything = torch.ones_like(texts.mask)  # padding as well: the public reading
    values = {
        "mid.img_mapped": model.region_proj(images.regions),
        "mid.img_attn_image0": looks[0][0],
        "mid.img_hidden": regions,
        "mid.img_emb": model.encode_images(images).pooled,
        "mid.bert_layer0": states[0],
        "mid.bert_last": states[-1],
        "mid.txt_pooled": model.read(states[-1], texts.lengths, everything),
        "mid.cap_emb": model.encode_texts(texts).pooled,
    }
    return {name: value for name, value in values.items() if name in arrays}


def public_losses(model: SAEM, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every term of the loss for the pairs of a golden case, inside the graph."""
    image_batch, text_batch = batches(arrays)
    images = model.encode_images(image_batch)
    chosen = torch.from_numpy(arrays["in.loss_caption_index"])
    texts = model.encode_texts(text_batch[chosen])
    scores, margin = model.score(images, texts), float(arrays["in.margin"])
    pooled = images.pooled, texts.pooled
    losses = {
        "loss_hard": hinge_loss(scores, margin, hardest=True),
        "loss_sum": hinge_loss(scores, margin, hardest=False),
        "loss_angular_hard": angular_loss(*pooled),
        "loss_angular_soft": angular_loss(*pooled, soft=True),
        "reg": model.weight_penalty * model.weight_norms(),
    }
    for epoch in (0, 4, 5, 10, 20, 21):
        model.set_epoch(epoch)
        own = model.extra_losses(images, texts, None)
        losses[f"loss_total_epoch{epoch}"] = losses["loss_hard"] + sum(own.values())
    return losses


# cell compare-training
def compare_gradients(
    table: Table, model: SAEM, arrays: Mapping[str, Any], prefix: str, loss: Tensor
) -> None:
    """Gradients, relative to the largest entry. Those of key biases are zero in theory:
    noise, measured against the gradient of the key matrix."""
    model.zero_grad()
    loss.backward(retain_graph=True)
    ours = dict(model.named_parameters())
    for key in (key for key in arrays if key.startswith(prefix)):
        gradient = ours[our_name(SAEM, key.removeprefix(prefix))].grad
        theirs = our_layout(torch.from_numpy(arrays[key]))
        scale = arrays.get(key.replace("key.bias", "key.weight"), arrays[key])
        scale = max(abs(scale).max(), 1e-6)
        table.add("gradients", key, gradient / scale, theirs / scale)


def compare_steps(
    table: Table, model: SAEM, arrays: Mapping[str, Any], rate: float
) -> None:
    """Five steps of Adam at epoch 0. The public clipping sees no parameter, so nothing is clipped."""
    optimizer = torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], rate
    )
    steps: dict[str, list] = {"loss_hinge": [], "loss_angular": [], "grad_norms": []}
    for _ in arrays["out.step_grad_norms"]:
        losses = public_losses(model.train(), arrays)
        optimizer.zero_grad()
        losses["loss_total_epoch0"].backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        optimizer.step()
        found = (losses["loss_hard"], losses["loss_angular_hard"], norm)
        for values, value in zip(steps.values(), found, strict=True):
            values.append(value.item())
    for name, values in steps.items():
        key = f"out.step_{name}"
        table.add("after five steps", key, values, arrays[key], relative=True)
    ours = dict(model.named_parameters())
    for key in (key for key in arrays if key.startswith("out.after.")):
        theirs = our_layout(torch.from_numpy(arrays[key]))
        value = ours[our_name(SAEM, key.removeprefix("out.after."))]
        table.add("after five steps", key, value, theirs, relative=True)


# cell compare-case
GRADIENTS = {
    "grad": "loss_hard",
    "gradangular": "loss_angular_hard",
    "gradtotal0": "loss_total_epoch0",
}


def compare_case(
    table: Table, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> bool:
    """One golden case: layers, scores, every loss term, three gradients, or five steps."""
    files = {name: about[name] for name in ("trans_cfg", "bert_config")}
    weights = {k[2:]: torch.from_numpy(v) for k, v in arrays.items() if k[:2] == "w."}
    model = SAEM.from_public(weights, {**about["options"], **files}).eval()
    for name, value in public_values(model, arrays).items():
        table.add("values", name, value, arrays[name])
    if "out.step_grad_norms" in arrays:
        compare_steps(table, model, arrays, about["options"]["learning_rate"])
        return True
    images, texts = batches(arrays)
    scores = model.score(model.encode_images(images), model.encode_texts(texts))
    table.add("values", "out.sims", scores.i2t, arrays["out.sims"])
    losses = public_losses(model, arrays)
    for name, value in losses.items():
        if f"out.{name}" in arrays:
            table.add("losses", name, value, arrays[f"out.{name}"], relative=True)
    for kind, name in GRADIENTS.items():
        compare_gradients(table, model, arrays, f"out.{kind}.", losses[name])
    return True

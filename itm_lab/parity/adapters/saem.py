"""SAEM as its authors published it: BERT inside, options, names of weights, and what its reference cases hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from itm_lab.parity.comparison import Arrays, Table, batches, load_public, our_name, to_device
from itm_utils.errors import input_error
from itm_utils.matcher import PairBatch, TextBatch, Texts
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.saem import SAEM, WINDOWS, TextCNN, TransformerLayer, angular_loss, matrix_norms
from itm_utils.models.scan import encode_words
from itm_utils.models.vsepp import hinge_loss, l2_normalize

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
EMBEDDING_NAMES = {
    "word_embeddings": "word_embedding",
    "position_embeddings": "position_embedding",
    "token_type_embeddings": "token_type_embedding",
    "LayerNorm.gamma": "norm.weight",
    "LayerNorm.beta": "norm.bias",
}
PUBLIC_LAYERS = {"img_enc.layer": "image_encoder.layers.0"} | {
    f"txt_enc.bert.encoder.layer.{n}": f"bert.layers.{n}" for n in range(24)
}  # BERT base has 12 layers, BERT large 24
NAMES = {
    "img_enc.mapping": "image_encoder.region_proj",
    "txt_enc.mapping": "text_encoder.proj",
    "txt_enc.convs1": "text_encoder.cnn.convs",
    "txt_enc.rnn": "text_encoder.gru",
    **{f"txt_enc.bert.embeddings.{public}": f"bert.{name}" for public, name in EMBEDDING_NAMES.items()},
    **{
        f"{public_layer}.{public}": f"{layer}.{name}"
        for public_layer, layer in PUBLIC_LAYERS.items()
        for public, name in LAYER_NAMES.items()
    },
}
POOLINGS = ("cnn", "pooling", "rnn")  # values of txt_stru; the command line reaches the first only
GRADIENTS = {"grad": "loss_hard", "gradangular": "loss_angular_hard", "gradtotal0": "loss_total_epoch0"}


class Bert(nn.Module):
    """BERT, frozen: three embeddings, a norm, and the Transformer layers of chapter 06."""

    def __init__(
        self, vocabulary_size: int, width: int, layers: int, heads: int, feed_forward: int, positions: int
    ) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary_size, width)
        self.position_embedding = nn.Embedding(positions, width)
        self.token_type_embedding = nn.Embedding(2, width)  # first or second segment
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(TransformerLayer(width, heads, feed_forward, dropout=0.0) for _ in range(layers))
        self.requires_grad_(False)

    def forward(self, words: Tensor, mask: Tensor) -> list[Tensor]:
        """Word-piece ids (c, w) with mask (c, w) to the states (c, w, d) after each layer."""
        positions = torch.arange(words.shape[1], device=words.device)
        states = self.word_embedding(words) + self.position_embedding(positions)
        states = self.norm(states + self.token_type_embedding.weight[0])
        after = []
        for layer in self.layers:
            states, _ = layer(states, mask)
            after.append(states)
        return after


class PublicTextEncoder(nn.Module):
    """The public text side after BERT: a text CNN, a GRU or a mean, then a projection."""

    def __init__(
        self, pooling: str, token_dim: int, channels: int, width: int, dropout: float, gru: Mapping[str, Any] | None
    ) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise input_error("txt_stru", repr(pooling), f"one of {', '.join(POOLINGS)}")
        self.pooling = pooling
        self.cnn = TextCNN(token_dim, channels) if pooling == "cnn" else None
        self.gru = nn.GRU(token_dim, batch_first=True, **(gru or {})) if pooling == "rnn" else None
        pooled_dim = {"cnn": len(WINDOWS) * channels, "pooling": token_dim, "rnn": (gru or {}).get("hidden_size")}
        self.proj = nn.Linear(pooled_dim[pooling], width)
        self.dropout = nn.Dropout(dropout)

    def pool(self, tokens: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
        """Tokens (c, w, token_dim) to one vector per caption, before the projection."""
        if self.cnn is not None:
            return self.cnn(tokens, mask)
        if self.gru is not None:
            return masked_mean(encode_words(self.gru, tokens, lengths), mask)
        return masked_mean(self.proj(tokens), mask)  # projected twice, as in the public code

    def forward(self, tokens: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
        """Tokens (c, w, token_dim) to (c, d)."""
        return self.proj(self.dropout(self.pool(tokens, lengths, mask)))


class PublicSAEM(SAEM):
    """SAEM with its BERT inside, from word-piece ids; padding takes part, as in the public code.

    bert, gru: arguments of ``Bert`` and of ``nn.GRU``; options: those of SAEM.
    """

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        bert: Mapping[str, int],
        pooling: str = "cnn",
        gru: Mapping[str, Any] | None = None,
        *,
        width: int,
        token_dim: int,
        channels: int,
        dropout: float,
        **options: Any,
    ) -> None:
        sizes = {"width": width, "token_dim": token_dim, "channels": channels, "dropout": dropout}
        super().__init__(vocabulary_size, image_dim, **sizes, **options, public_padding=True)
        self.bert = Bert(vocabulary_size, token_dim, **bert)
        self.text_encoder = PublicTextEncoder(pooling, token_dim, channels, width, dropout, gru)

    def encode_texts(self, batch: TextBatch) -> Texts:
        all_positions = torch.ones_like(batch.mask)
        states = self.bert(batch.words, batch.mask)[-1]
        return Texts(pooled=l2_normalize(self.text_encoder(states, batch.lengths, all_positions)))


def load(state_dict: Mapping[str, Tensor], options: Mapping[str, Any]) -> PublicSAEM:
    """SAEM with public weights.

    options: those of the command line, and the content of the two files it reads, trans_cfg and bert_config.
    """
    weights = {
        name: our_layout(value)
        for name, value in state_dict.items()
        if ".bert.pooler." not in name  # computed in the public code, and used nowhere
    }
    return load_public(PublicSAEM(**config(options)), weights, NAMES)


def load_case(about: Mapping[str, Any], arrays: Arrays) -> PublicSAEM:
    """The model of a reference case."""
    files = {name: about[name] for name in ("trans_cfg", "bert_config")}
    weights = {name[2:]: to_device(array) for name, array in arrays.items() if name.startswith("w.")}
    return load(weights, {**about["options"], **files})


def our_layout(weight: Tensor) -> Tensor:
    """The public text CNN has two-dimensional filters (n, 1, w, d); ours are (n, d, w)."""
    return weight[:, 0].mT if weight.dim() == 4 else weight


def config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The public options and the two files they name, as arguments of ``PublicSAEM``."""
    needed = ("img_dim", "final_dims", "txt_stru", "txt_out_channel", "trans_cfg", "bert_config")
    for name in needed:
        if name not in options:
            raise input_error("public options", f"no {name}", "all that shape the model")
    layer, text = options["trans_cfg"], options["bert_config"]
    if not (isinstance(layer, Mapping) and isinstance(text, Mapping)):
        found, expected = "the name of a file", "its content, as a mapping"
        raise input_error("trans_cfg, bert_config", found, expected)
    if layer["hidden_size"] != options["final_dims"]:
        found = f"{layer['hidden_size']} and {options['final_dims']}"
        raise input_error("hidden_size, final_dims", found, "the same number")
    ours = {
        "vocabulary_size": text["vocab_size"],
        "image_dim": options["img_dim"],
        "width": options["final_dims"],
        "token_dim": text["hidden_size"],
        "heads": layer["num_attention_heads"],
        "feed_forward": layer["intermediate_size"],
        "channels": options["txt_out_channel"],
        "dropout": layer["hidden_dropout_prob"],
        "pooling": options["txt_stru"],
        "bert": {
            "layers": text["num_hidden_layers"],
            "heads": text["num_attention_heads"],
            "feed_forward": text["intermediate_size"],
            "positions": text["max_position_embeddings"],
        },
    }
    if ours["pooling"] == "rnn":
        ours["gru"] = {
            "hidden_size": options["embed_size"],
            "num_layers": options["num_layers"],
            "bidirectional": options["bi_gru"],
        }
    return ours


def values(model: PublicSAEM, arrays: Arrays) -> dict[str, Tensor]:
    """Our values for the intermediate arrays of a case, where it has them."""
    images, texts = batches(arrays)
    regions, weights = model.image_encoder(images)
    states = model.bert(texts.words, texts.mask)
    all_positions = torch.ones_like(texts.mask)
    found = {
        "mid.img_mapped": model.image_encoder.region_proj(images.regions),
        "mid.img_attn_image0": weights[0][0],
        "mid.img_hidden": regions,
        "mid.img_emb": model.encode_images(images).pooled,
        "mid.bert_layer0": states[0],
        "mid.bert_last": states[-1],
        "mid.txt_pooled": model.text_encoder.pool(states[-1], texts.lengths, all_positions),
        "mid.cap_emb": model.encode_texts(texts).pooled,
    }
    return {name: value for name, value in found.items() if name in arrays}


def losses(model: SAEM, arrays: Arrays) -> dict[str, Tensor]:
    """Every term of the loss for the pairs of a case, inside the graph."""
    image_batch, text_batch = batches(arrays)
    images = model.encode_images(image_batch)
    chosen = torch.from_numpy(arrays["in.loss_caption_index"])
    texts = model.encode_texts(text_batch[chosen])
    batch = PairBatch(image_batch, text_batch[chosen])
    scores, margin = model.score(images, texts), float(arrays["in.margin"])
    pooled = images.pooled, texts.pooled
    terms = {
        "loss_hard": hinge_loss(scores, margin, hardest=True),
        "loss_sum": hinge_loss(scores, margin, hardest=False),
        "loss_angular_hard": angular_loss(*pooled),
        "loss_angular_soft": angular_loss(*pooled, soft=True),
        "reg": model.weight_penalty * matrix_norms(model.image_encoder),
    }
    for epoch in (0, 4, 5, 10, 20, 21):
        model.set_epoch(epoch)
        extra = model.extra_losses(images, texts, batch)
        terms[f"loss_total_epoch{epoch}"] = terms["loss_hard"] + sum(extra.values())
    return terms


def compare_case(table: Table, about: Mapping[str, Any], arrays: Arrays) -> bool:
    """One reference case: layers, scores, every loss term, three gradients, or five steps."""
    model = load_case(about, arrays).eval()
    for name, value in values(model, arrays).items():
        table.add("values", name, value, arrays[name])
    if "out.step_grad_norms" in arrays:
        compare_steps(table, model, arrays, about["options"]["learning_rate"])
        return True
    images, texts = batches(arrays)
    scores = model.score(model.encode_images(images), model.encode_texts(texts))
    table.add("values", "out.sims", scores.i2t, arrays["out.sims"])
    terms = losses(model, arrays)
    for name, value in terms.items():
        if f"out.{name}" in arrays:
            table.add("losses", name, value, arrays[f"out.{name}"], relative=True)
    for kind, name in GRADIENTS.items():
        compare_gradients(table, model, arrays, f"out.{kind}.", terms[name])
    return True


def compare_gradients(table: Table, model: SAEM, arrays: Arrays, prefix: str, loss: Tensor) -> None:
    """Gradients, relative to the largest entry.

    Those of key biases are zero in theory: noise, measured against the gradient of the key matrix.
    """
    model.zero_grad()
    loss.backward(retain_graph=True)
    ours = dict(model.named_parameters())
    for key in (key for key in arrays if key.startswith(prefix)):
        gradient = ours[our_name(NAMES, key.removeprefix(prefix))].grad
        theirs = our_layout(to_device(arrays[key]))
        scale = arrays.get(key.replace("key.bias", "key.weight"), arrays[key])
        scale = max(abs(scale).max(), 1e-6)
        table.add("gradients", key, gradient / scale, theirs / scale)


def compare_steps(table: Table, model: SAEM, arrays: Arrays, learning_rate: float) -> None:
    """Five steps of Adam at epoch 0. The public clipping sees no parameter, so nothing is clipped."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], learning_rate)
    steps: dict[str, list] = {"loss_hinge": [], "loss_angular": [], "grad_norms": []}
    for _ in arrays["out.step_grad_norms"]:
        terms = losses(model.train(), arrays)
        optimizer.zero_grad()
        terms["loss_total_epoch0"].backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        found = (terms["loss_hard"], terms["loss_angular_hard"], norm)
        for numbers, value in zip(steps.values(), found, strict=True):
            numbers.append(value.item())
    for name, numbers in steps.items():
        key = f"out.step_{name}"
        table.add("after five steps", key, numbers, arrays[key], relative=True)
    ours = dict(model.named_parameters())
    for key in (key for key in arrays if key.startswith("out.after.")):
        theirs = our_layout(to_device(arrays[key]))
        value = ours[our_name(NAMES, key.removeprefix("out.after."))]
        table.add("after five steps", key, value, theirs, relative=True)

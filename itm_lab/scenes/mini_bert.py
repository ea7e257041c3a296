"""Pre-train the miniature BERT: a real ``transformers.BertModel`` that has read nothing but scene captions.

Two layers of width 64, a WordPiece vocabulary of its own, masked language modelling as in the original (15 % of
the tokens; of these 80 % masked, 10 % replaced, 10 % kept). The captions come from a generator seed that no
dataset uses. ``itm scenes train-bert`` makes the shipped files again (a few minutes on one core).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from itm_lab.scenes.families import sample_split
from itm_lab.scenes.world import Knobs
from itm_utils.data.text_encoder import MINI_FOLDER
from itm_utils.progress import bar

if TYPE_CHECKING:
    from transformers import BertForMaskedLM

FOLDER = MINI_FOLDER
BERT_SEED = 8_001  # generator seed of the captions it reads; no dataset uses it
PIECES = 240  # size of the vocabulary: a few rare words fall into pieces, as with a real BERT
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train(scenes: int = 4_000, steps: int = 2_000, batch: int = 128, folder: Path = FOLDER) -> dict[str, float]:
    """Make vocabulary and weights, save them, and return the masked-word accuracy on captions not read."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    captions, unseen = scene_captions(scenes, 0), scene_captions(200, 1)
    tokenizer = train_tokenizer(captions, folder)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    ids = encode(tokenizer, captions)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=3e-3, total_steps=steps)
    for _ in bar(range(steps), "training mini BERT", "step"):
        rows = ids[torch.randint(len(ids), (batch,))]
        rows = rows[:, : int((rows != 0).sum(dim=1).max())]
        masked, labels = mask(rows, config.vocab_size)
        loss = model(input_ids=masked, attention_mask=(rows != 0).long(), labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    save(model, folder)
    return {"masked accuracy": accuracy(model, encode(tokenizer, unseen)), "pieces": config.vocab_size}


def scene_captions(scenes: int, split: int) -> list[str]:
    """Captions of freshly made scenes."""
    return [c.text for member in sample_split(BERT_SEED, split, scenes, Knobs()) for c in member.captions]


def train_tokenizer(captions: list[str], folder: Path):
    """A WordPiece vocabulary of the captions, saved as ``vocab.txt``."""
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(
        captions, vocab_size=PIECES, min_frequency=2, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.save_model(str(folder))
    return tokenizer


def encode(tokenizer, captions: list[str]) -> Tensor:
    """(c, w) token ids padded with 0."""
    rows = [torch.tensor(item.ids) for item in tokenizer.encode_batch(captions)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def mask(ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Inputs with some tokens hidden, and labels that are -100 elsewhere."""
    chosen = (torch.rand(ids.shape) < 0.15) & (ids >= len(SPECIAL))
    labels = torch.where(chosen, ids, -100)
    fate = torch.rand(ids.shape)
    inputs = torch.where(chosen & (fate < 0.8), SPECIAL.index("[MASK]"), ids)
    replaced = torch.randint(len(SPECIAL), vocabulary, ids.shape)
    return torch.where(chosen & (fate >= 0.9), replaced, inputs), labels


@torch.inference_mode()
def accuracy(model: BertForMaskedLM, ids: Tensor) -> float:
    """Share of chosen tokens that the model names right."""
    torch.manual_seed(1)
    masked, labels = mask(ids, model.config.vocab_size)
    guesses = model(input_ids=masked, attention_mask=(ids != 0).long()).logits.argmax(dim=-1)
    return (guesses == labels)[labels != -100].float().mean().item()


def save(model: BertForMaskedLM, folder: Path) -> None:
    """The encoder in half precision, as ``transformers`` reads it: weights, config.json, tokenizer settings."""
    weights = {
        f"bert.{k}": v.half().contiguous() for k, v in model.bert.state_dict().items() if "position_ids" not in k
    }
    # Masked words train no pooler; one of zeros keeps every loader from inventing a random one.
    width = model.config.hidden_size
    weights["bert.pooler.dense.weight"] = torch.zeros(width, width, dtype=torch.float16)
    weights["bert.pooler.dense.bias"] = torch.zeros(width, dtype=torch.float16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    model.config.to_json_file(folder / "config.json")
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer", "do_lower_case": true, "model_max_length": 64}\n', encoding="utf-8"
    )

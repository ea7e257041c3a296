"""Frozen BERT states of captions, computed once and kept on disk.

The papers freeze BERT and train on its token states. Here any BERT of ``transformers`` can do that: one from a
model hub by name, one in a local folder, or ``scenes-mini``, the two-layer BERT that comes with the package.
Nothing below knows which one it has.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from itm_utils import distributed
from itm_utils.cache import cache_root, ensure_folder, is_whole, read_manifest
from itm_utils.data.precomp import PrecompSplit, load_array
from itm_utils.errors import input_error
from itm_utils.files import reserve
from itm_utils.matcher import ABSENT, TextBatch
from itm_utils.progress import bar

MINI = "scenes-mini"
MINI_FOLDER = Path(__file__).parent / "mini_bert"


@dataclass(frozen=True)
class FrozenTextEncoder:
    """A frozen ``transformers`` BERT with its tokenizer. ``fingerprint`` names weights, vocabulary and settings."""

    name: str
    tokenizer: Any
    model: torch.nn.Module
    fingerprint: str

    @property
    def width(self) -> int:
        """Numbers in one layer's state of a token."""
        return cast(Any, self.model.config).hidden_size

    @property
    def longest(self) -> int:
        """Tokens that the model's position table has room for."""
        return cast(Any, self.model.config).max_position_embeddings


def load_text_encoder(name: str | Path = MINI) -> FrozenTextEncoder:
    """A frozen encoder by name: ``scenes-mini``, a local folder, or a model of the hub."""
    source = MINI_FOLDER if str(name) == MINI else Path(name) if Path(name).is_dir() else str(name)
    local = isinstance(source, Path)
    attempts = (True,) if local else (True, False)  # a model that is here needs no request to the hub
    for local_only in attempts:
        try:
            tokenizer, model = _load(source, local_only)
            break
        except Exception as error:  # damaged files fail in many ways, and each concerns this one model only
            if local_only == attempts[-1]:
                raise _not_to_be_had(name, local, error) from error
    if not tokenizer.is_fast:
        raise input_error(name, "a tokenizer without character offsets", "a fast tokenizer")
    model = model.eval().requires_grad_(False)
    return FrozenTextEncoder(str(name), tokenizer, model, _fingerprint(tokenizer, model))


def _load(source: str | Path, local_files_only: bool) -> tuple[Any, torch.nn.Module]:
    """Tokenizer and model, without the bars and reports that ``transformers`` prints on loading."""
    # Imported here: transformers takes seconds, and most chapters do without it.
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        # Code of the model's own is never run, and weights are never unpickled. The fingerprint of what was loaded
        # goes into every receipt, so no revision is named here.
        safe: dict[str, Any] = {"local_files_only": local_files_only, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(source, **safe)  # nosec B615
        model = AutoModel.from_pretrained(source, use_safetensors=True, dtype=torch.float32, **safe)  # nosec B615
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    return tokenizer, model


def _not_to_be_had(name: str | Path, local: bool, error: Exception) -> Exception:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    if "trust_remote_code" in str(error):
        return input_error(name, "a model that asks to run code of its own", "a model that transformers knows")
    if local:
        expected = "config.json, model.safetensors and vocabulary in this folder"
        return input_error(name, f"no usable BERT ({reason})", expected, "Weights as pickle (*.bin) are not loaded.")
    return input_error(
        name,
        f"neither a folder nor a model in the local cache, and the hub gave none ({reason})",
        "a BERT",
        f"Offline, use {MINI!r} or the path of a folder that holds the model; book/datasets.md says where to get one.",
    )


def _fingerprint(tokenizer: Any, model: torch.nn.Module) -> str:
    """Hash of the weights and of how text is cut, whatever the model's name is.

    Without the pooler: token states do not go through it, and checkpoints without one get a random one.
    """
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    for name, value in sorted(model.state_dict().items()):
        if name.startswith("pooler."):
            continue
        digest.update(name.encode())
        digest.update(value.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class BertCaptions:
    """All captions of a split as cached token states; stands where ``WordCaptions`` stands.

    One flat, memory-mapped array holds the states of all tokens; caption c has rows ``starts[c]:starts[c + 1]``.
    Its first ``lengths[c]`` rows are tokens; where padding was kept, the states under it follow.
    special: (tokens,) True at [CLS] and [SEP]. spans: (tokens, 2) characters of the caption that a token covers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.starts = np.load(self.folder / "starts.npy")
        self.rows = np.diff(self.starts)
        self.lengths = np.load(self.folder / "lengths.npy") if self.manifest.get("padded") else self.rows
        self.special = np.load(self.folder / "special.npy")
        self.spans = np.load(self.folder / "spans.npy")
        self.fingerprint = self.folder.name  # a hash of encoder, layers and captions
        self._states: np.ndarray | None = self._open()  # now: an open file outlives a cache that is emptied

    def __len__(self) -> int:
        return len(self.lengths)

    def __getstate__(self) -> dict[str, Any]:
        # A worker opens the map itself: pickling it would send the whole array.
        return {**self.__dict__, "_states": None}

    @property
    def states(self) -> np.ndarray:
        """(tokens, d) float16, memory-mapped."""
        if (states := self._states) is None:
            states = self._states = self._open()
        return states

    def _open(self) -> np.ndarray:
        return load_array(self.folder / "states.npy", mmap_mode="r")

    @property
    def feature_dim(self) -> int:
        """Width d of a token state."""
        return self.states.shape[1]

    def batch(self, captions: np.ndarray, spans: bool = False) -> TextBatch:
        """States padded with zeros to the longest caption asked for; with ``spans`` also the characters covered.

        Where padding was kept (see :func:`bert_captions`) its states stand in place of the zeros.
        """
        captions = np.asarray(captions, dtype=np.int64)
        lengths, rows = self.lengths[captions], self.rows[captions]
        shape = (len(captions), int(rows.max()))
        features = np.zeros((*shape, self.feature_dim), dtype=np.float32)
        special = np.zeros(shape, dtype=bool)
        covered = np.zeros((*shape, 2), dtype=np.int64)
        for row, (caption, count) in enumerate(zip(captions, rows, strict=True)):
            tokens = slice(self.starts[caption], self.starts[caption] + count)
            features[row, :count] = self.states[tokens]
            special[row, :count] = self.special[tokens]
            covered[row, :count] = self.spans[tokens]
        return TextBatch(
            lengths=torch.from_numpy(lengths),
            ids=torch.from_numpy(captions),
            features=torch.from_numpy(features),
            special=torch.from_numpy(special),
            spans=torch.from_numpy(covered) if spans else ABSENT,
        )


def bert_captions(
    split: PrecompSplit,
    encoder: str | Path | FrozenTextEncoder = MINI,
    layers: tuple[int, ...] = (-1,),
    max_tokens: int | None = None,
    batch_size: int = 64,
    padded: bool = False,
) -> BertCaptions:
    """The split's captions as frozen states, computed on first use and cached under a hash of what decides them.

    layers: hidden states that are put side by side; -1 is the last layer, 0 the embeddings.
    max_tokens: cut longer captions to this many tokens, special ones included (SAEM: 32).
    padded: pad every caption to ``max_tokens`` and keep the states under the padding, as public SAEM does. They are
    not zero, and a model that does not mask them depends on them.

    Several processes that call it together share the captions; one of them writes the folder.
    """
    if not isinstance(encoder, FrozenTextEncoder):
        encoder = load_text_encoder(encoder)
    max_tokens = min(max_tokens or encoder.longest, encoder.longest)
    facts = {
        "encoder": encoder.fingerprint,
        "name": encoder.name,
        "layers": list(layers),
        "max_tokens": max_tokens,
        "captions": hashlib.sha256("\n".join(split.captions).encode()).hexdigest(),
    }
    if padded:
        facts["padded"] = True
    decisive = json.dumps({key: value for key, value in facts.items() if key != "name"}, sort_keys=True)
    name = f"bert-{hashlib.sha256(decisive.encode()).hexdigest()[:16]}"

    work = _Encoding(encoder, split.captions, layers, max_tokens, batch_size, padded)
    together = distributed.processes() > 1 and not is_whole(cache_root() / name)
    if distributed.agreed(together) and len(work.batches) >= distributed.processes():
        work.encode_together(name)
    if distributed.is_main():
        ensure_folder(name, lambda folder: work.write(folder) or facts)
        work.remove_parts(name)
    distributed.wait_for_all()
    return BertCaptions(cache_root() / name)


class _Encoding:
    """The captions of a split on their way through an encoder, in batches of similar length (little padding)."""

    def __init__(
        self,
        encoder: FrozenTextEncoder,
        captions: list[str],
        layers: tuple[int, ...],
        longest: int,
        batch_size: int,
        padded: bool,
    ) -> None:
        self.encoder, self.captions, self.layers, self.longest = encoder, captions, layers, longest
        self.batch_size, self.padded = batch_size, padded
        self.parts: list[Path] = []  # what several processes have encoded, each in a folder of its own

    @cached_property
    def cut(self) -> Any:
        """Tokens of all captions."""
        more = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
        return self.encoder.tokenizer(self.captions, truncation=True, max_length=self.longest, **more)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.cut["input_ids"]])

    @property
    def rows(self) -> np.ndarray:
        """States that are kept of each caption."""
        return np.full_like(self.lengths, self.longest) if self.padded else self.lengths

    @property
    def width(self) -> int:
        return len(self.layers) * self.encoder.width

    @cached_property
    def batches(self) -> list[np.ndarray]:
        """Captions that are encoded together."""
        order = np.argsort(self.lengths, kind="stable")
        return [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]

    def states(self, some: np.ndarray) -> np.ndarray:
        """(c, w, d) float16 states of a batch."""
        ids = [self.cut["input_ids"][row] for row in some]
        return _hidden(self.encoder, ids, self.layers, self.longest if self.padded else 0)

    def encode_together(self, name: str) -> None:
        """Have each process encode every so-many-th batch, and write a folder of its own beside ``name``."""
        count = distributed.processes()
        folders = [f"{name}-{number + 1}-of-{count}" for number in range(count)]
        ensure_folder(folders[distributed.rank()], self.write_part)
        distributed.wait_for_all()
        self.parts = [cache_root() / folder for folder in folders]

    def write_part(self, folder: Path) -> dict[str, Any]:
        """The states of the batches of this process, one after the other."""
        mine = self.batches[distributed.rank() :: distributed.processes()]
        total = sum(int(self.rows[some].sum()) for some in mine)
        with _new_states(folder, (total, self.width)) as states:
            row = 0
            for some in bar(mine, f"encode captions with {self.encoder.name}", "batch"):
                for count, state in zip(self.rows[some], self.states(some), strict=True):
                    states[row : row + count] = state[:count]
                    row += count
        return {"part": distributed.rank() + 1, "of": distributed.processes()}

    def encoded(self) -> Iterator[Iterator[np.ndarray]]:
        """The states of each caption of each batch, computed or read."""
        if not self.parts:
            for some in bar(self.batches, f"encode captions with {self.encoder.name}", "batch"):
                yield (state[:count] for count, state in zip(self.rows[some], self.states(some), strict=True))
            return
        parts = [load_array(part / "states.npy", mmap_mode="r") for part in self.parts]
        read = [0] * len(parts)
        for number, some in enumerate(self.batches):
            part = number % len(parts)
            ends = read[part] + np.cumsum(self.rows[some])
            read[part] = int(ends[-1])
            yield (parts[part][end - count : end] for count, end in zip(self.rows[some], ends, strict=True))

    def write(self, folder: Path) -> None:
        """Store all states in order of the file, in half precision."""
        starts = np.concatenate([[0], np.cumsum(self.rows)])
        with _new_states(folder, (int(starts[-1]), self.width)) as states:
            for some, encoded in zip(self.batches, self.encoded(), strict=True):
                for row, state in zip(some, encoded, strict=True):
                    states[starts[row] : starts[row + 1]] = state
            if not np.isfinite(states).all():
                raise input_error(self.encoder.name, "states too large for half precision", "finite numbers")
        np.save(folder / "starts.npy", starts)
        if self.padded:
            np.save(folder / "lengths.npy", self.lengths)
        np.save(folder / "special.npy", _flat(self.cut["special_tokens_mask"], starts, False).astype(bool))
        np.save(folder / "spans.npy", _flat(self.cut["offset_mapping"], starts, (0, 0)).astype(np.int32))

    def remove_parts(self, name: str) -> None:
        """Remove what was joined, and what an interruption left of it."""
        for part in cache_root().glob(f"{name}-*-of-*") if self.parts else ():
            shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)


@contextmanager
def _new_states(folder: Path, shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """A new file of states, whose room on the disk is taken before anything is computed."""
    states = np.lib.format.open_memmap(folder / "states.npy", mode="w+", dtype=np.float16, shape=shape)
    reserve(folder / "states.npy")
    yield states
    states.flush()


def _flat(values: list[list[Any]], starts: np.ndarray, nothing: Any) -> np.ndarray:
    """Values of all tokens in one array, ``nothing`` under the padding."""
    flat = np.full((int(starts[-1]), *np.shape(nothing)), nothing)
    for start, part in zip(starts, values, strict=False):
        flat[start : start + len(part)] = part
    return flat


@torch.inference_mode()
def _hidden(encoder: FrozenTextEncoder, ids: list[list[int]], layers: tuple[int, ...], least: int = 0) -> np.ndarray:
    """(c, w, len(layers) * d) float16 states of a batch padded to its longest caption, or to ``least`` tokens."""
    lengths = torch.tensor([len(row) for row in ids])
    padded = torch.full((len(ids), max(int(lengths.max()), least)), encoder.tokenizer.pad_token_id)
    for row, tokens in enumerate(ids):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    mask = torch.arange(padded.shape[1])[None, :] < lengths[:, None]
    device = next(encoder.model.parameters()).device
    output = encoder.model(
        input_ids=padded.to(device), attention_mask=mask.long().to(device), output_hidden_states=True
    )
    chosen = [output.hidden_states[layer] for layer in layers]
    return torch.cat(chosen, dim=-1).half().cpu().numpy()

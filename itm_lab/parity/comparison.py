"""Compare our numbers with those of reference cases: names, batches, differences.

A case is a pair of files, ``<case>.json`` (model, options) and ``<case>.npz`` (``in.*`` inputs, ``w.*`` public weights,
``mid.*`` and ``out.*`` what the public code gave).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from itm_utils.errors import input_error
from itm_utils.matcher import ABSENT, ImageBatch, Matcher, Scores, TextBatch
from itm_utils.metrics.retrieval import Direction, evaluate_folds, five_captions_each, retrieval_ranks, summarise

Arrays = Mapping[str, np.ndarray]
MatcherType = TypeVar("MatcherType", bound=Matcher)
# Absolute for scores and intermediate values; relative to the largest entry for the rest.
TOLERANCES = {"values": 2e-5, "losses": 2e-5, "gradients": 2e-4, "after five steps": 2e-3, "metrics": 0.0}

DEVICE = ContextVar("DEVICE", default="cpu")  # where our models compute; see comparing_on


@contextmanager
def comparing_on(device: str) -> Iterator[None]:
    """Compare on another device than the CPU, such as cuda."""
    token = DEVICE.set(device)
    try:
        yield
    finally:
        DEVICE.reset(token)


def to_device(array: np.ndarray) -> Tensor:
    """An array of a case as a tensor where our models compute."""
    return torch.from_numpy(array).to(DEVICE.get())


@dataclass(frozen=True)
class Difference:
    """The largest difference in one kind of quantity of one case, and where it was found."""

    case: str
    kind: str
    difference: float
    compared: int
    worst: str

    @property
    def ok(self) -> bool:
        return self.difference <= TOLERANCES[self.kind]  # false for NaN

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"BEYOND at {self.worst}"
        allowed = f"{self.difference:8.1e} of {TOLERANCES[self.kind]:.0e}"
        return f"{self.case:44} {self.kind:16} {allowed} {self.compared:5} arrays  {verdict}"


class Table:
    """Collects differences by kind."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.found: dict[str, list[tuple[float, str]]] = {}

    def add(self, kind: str, name: str, ours: Any, theirs: Any, relative: bool = False) -> None:
        ours, theirs = _numbers(ours), _numbers(theirs)
        if theirs.shape == (*ours.shape, 1):  # a convolution over single positions is a linear layer
            theirs = theirs[..., 0]
        if ours.shape != theirs.shape:
            raise input_error(self.case, f"{name} of shape {ours.shape}", f"shape {theirs.shape}")
        scale = max(np.abs(theirs).max(initial=0.0), 1e-6) if relative else 1.0
        # np.max passes NaN on, and a NaN is beyond every tolerance
        self.found.setdefault(kind, []).append((float(np.max(np.abs(ours - theirs), initial=0.0) / scale), name))

    def rows(self) -> list[Difference]:
        rows = []
        for kind, found in self.found.items():
            difference, worst = max(found, key=lambda item: (np.isnan(item[0]), item[0]))
            rows.append(Difference(self.case, kind, difference, len(found), worst))
        return rows


def our_name(names: Mapping[str, str], public: str) -> str:
    """Our name of a public parameter: the longest prefix that ``names`` maps is replaced."""
    prefixes = [prefix for prefix in names if public == prefix or public.startswith(prefix + ".")]
    if not prefixes:
        raise input_error("public weights", f"the name {public}", "one that its adapter maps")
    prefix = max(prefixes, key=len)
    return names[prefix] + public.removeprefix(prefix)


def load_public(model: MatcherType, state_dict: Mapping[str, Tensor], names: Mapping[str, str]) -> MatcherType:
    """Fill a model with public weights: every one must have its place, and every place its one."""
    weights = {our_name(names, name): value for name, value in state_dict.items()}
    places = model.state_dict()
    for name in sorted(places.keys() ^ weights.keys()):
        found = "no weight" if name in places else "a weight that has no place"
        expected = f"the weights of {type(model).__name__} with these options"
        raise input_error(f"public weights, {name}", found, expected)
    for name, value in weights.items():
        found, expected = tuple(value.shape), tuple(places[name].shape)
        if found != expected:
            raise input_error(f"public weights, {name}", f"shape {found}", f"{expected}")
    model.load_state_dict(weights)
    return model.to(DEVICE.get())


def batches(arrays: Arrays) -> tuple[ImageBatch, TextBatch]:
    """The inputs of a case as a matcher receives them."""
    regions = to_device(arrays["in.images"])
    regions = regions[:, None, :] if regions.dim() == 2 else regions
    mask = torch.ones(regions.shape[:2], dtype=torch.bool, device=regions.device)
    lengths = torch.from_numpy(arrays["in.lengths"])  # stay on the CPU
    boxes = to_device(arrays["in.boxes"]) if "in.boxes" in arrays else ABSENT
    images = ImageBatch(regions=regions, mask=mask, ids=torch.arange(len(regions), device=regions.device), boxes=boxes)
    captions = {"features": "in.text"} if "in.text" in arrays else {"words": "in.tokens"}
    tokens = {name: to_device(arrays[key]) for name, key in captions.items()}
    ids = torch.arange(len(lengths), device=regions.device)
    return images, TextBatch(lengths=lengths, ids=ids, **tokens)


def all_scores(model: Matcher, arrays: Arrays) -> Scores:
    """(images, captions) scores of a case, inside the graph."""
    images, texts = batches(arrays)
    return model.score(model.encode_images(images), model.encode_texts(texts))


def compare_gradients(
    table: Table, model: Matcher, arrays: Arrays, prefix: str, loss: Tensor, names: Mapping[str, str]
) -> None:
    """Gradients of a loss, each relative to its largest entry, or to a hundredth of the largest of all.

    The second bound is for gradients that are zero in theory, such as those of key biases: what is left is noise.
    """
    model.zero_grad()
    loss.backward(retain_graph=True)  # several losses of a case may share a graph
    ours = dict(model.named_parameters())
    expected = {key: array for key, array in arrays.items() if key.startswith(prefix)}
    floor = max(1e-6, 0.01 * max(np.abs(array).max() for array in expected.values()))
    for key, array in expected.items():
        gradient = ours[our_name(names, key.removeprefix(prefix))].grad
        assert gradient is not None
        scale = max(float(np.abs(array).max()), floor)
        table.add("gradients", key, gradient / scale, array / scale)


def compare_metrics(table: Table, arrays: Arrays) -> None:
    """Ranks and recalls from a stored matrix, or from one that a recipe describes."""
    if "in.seeds" in arrays:
        for fold, seed in enumerate(arrays["in.seeds"]):
            parts = {key: arrays[f"out.fold_{key}"][fold] for key in ("i2t", "t2i")}
            _compare_ranks(table, recipe_matrix(arrays, int(seed)), parts, f"fold {fold} ")
        return
    sims = arrays.get("in.sims", arrays.get("out.sims"))
    sims = recipe_matrix(arrays, int(arrays["in.seed"])) if sims is None else sims
    prefix = "out.full_" if "out.full_i2t" in arrays else "out."
    _compare_ranks(table, sims, {key: arrays[prefix + key] for key in ("i2t", "t2i")}, "")
    if "out.i2t_ranks" in arrays:
        ranks = retrieval_ranks(Scores.same(torch.from_numpy(sims)), five_captions_each(len(sims)))
        table.add("metrics", "out.i2t_ranks", ranks.i2t, arrays["out.i2t_ranks"])
        table.add("metrics", "out.t2i_ranks", ranks.t2i, arrays["out.t2i_ranks"])
    if "out.rsum" in arrays:
        total = summarise(
            retrieval_ranks(Scores.same(torch.from_numpy(sims)), five_captions_each(len(sims))), "all"
        ).rsum
        table.add("metrics", "out.rsum", np.float32(total), arrays["out.rsum"])
    if "out.mean_i2t" in arrays:
        mean = evaluate_folds(Scores.same(torch.from_numpy(sims)), five_captions_each(len(sims)))
        for key in ("i2t", "t2i"):
            table.add("metrics", f"out.mean_{key}", _five(getattr(mean, key)), arrays[f"out.mean_{key}"])


def recipe_matrix(arrays: Arrays, seed: int) -> np.ndarray:
    """The matrix that a recipe case describes: (n, 5n), all entries distinct and exact in float32."""
    n, power = int(arrays["in.n_images"]), int(arrays["in.power"])
    total = 5 * n * n
    rng = np.random.RandomState(seed)
    x = rng.permutation(total).astype(np.float64).reshape(n, 5 * n)
    v = rng.rand(5 * n)
    w = np.multiply.reduce([v] * power)
    columns = np.arange(5 * n)
    x[columns // 5, columns] = total - (total / 2) * w
    ranks = np.empty(total, dtype=np.float32)
    ranks[np.argsort(x.ravel(), kind="stable")] = np.arange(total, dtype=np.float32)
    return ranks.reshape(n, 5 * n)


def _compare_ranks(table: Table, sims: np.ndarray, expected: Mapping[str, np.ndarray], where: str) -> None:
    result = summarise(retrieval_ranks(Scores.same(torch.from_numpy(sims)), five_captions_each(len(sims))), "all")
    for key in ("i2t", "t2i"):
        table.add("metrics", f"{where}{key}", _five(getattr(result, key)), expected[key])


def _five(direction: Direction) -> np.ndarray:
    """In float32, in which the reference values are stored: a difference of zero then means equal."""
    numbers = (direction.r1, direction.r5, direction.r10, direction.median_rank, direction.mean_rank)
    return np.array(numbers, dtype=np.float32)


def _numbers(value: Any) -> np.ndarray:
    return (value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)).astype(np.float64)

"""Check an answer to an exercise: run it on cases drawn from a seed, compare it with a slow reference, say what differs.

Two halves that may stand in two processes: :func:`collect` runs the answer and needs no reference, :func:`judge` compares
what was collected and runs nothing of the answer. :func:`check_answer` does both, for a check cell.
"""

from __future__ import annotations

import builtins
import hashlib
import math
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

STUDENT_VARIABLE = "ITM_STUDENT"  # whose cases a check cell draws
POINTS = {"easy": 1, "solid": 2, "hard": 3}
# Bound here: an answer that replaces them later changes neither what is read from it nor how it is compared.
_array, _tensor_types = np.asarray, (Tensor, nn.Parameter)
_numbers = (bool, int, float, str)
_detach, _to, _numpy = Tensor.detach, Tensor.to, Tensor.numpy
_isfinite, _abs, _where = np.isfinite, np.abs, np.argwhere


class Draw:
    """Random inputs of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def unit(self, *shape: int) -> Tensor:
        """Vectors of unit norm along the last axis."""
        return nn.functional.normalize(self.normal(*shape), dim=-1)

    def integer(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def order(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)

    def weights(self, *shape: int, dim: int, mask: Tensor | None = None) -> Tensor:
        """Attention weights: a softmax along ``dim`` of random logits, exactly 0 where the mask is False."""
        logits = 2 * self.normal(*shape)
        return (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(dim=dim)


@dataclass(frozen=True)
class Case:
    """One set of inputs. name: what is special about it. hint: what an answer overlooks that is wrong only from here on."""

    name: str
    inputs: tuple[Any, ...]
    hint: str = ""


@dataclass(frozen=True)
class Exercise:
    """What decides whether an answer is right.

    reference: a slow and obvious right answer. cases: from a draw, the plain ones first, each later one with one more difficulty.
    mistakes: words → a wrong answer that deserves them. shape: what the axes of the result are.
    observe: calls the answer on the inputs of one case and returns what is compared. judge: for exercises with many
    right answers: what is wrong with an observation, empty if nothing is.
    """

    label: str
    reference: Callable[..., Any]
    cases: Callable[[Draw], Iterable[Case]]
    mistakes: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    shape: str = ""
    observe: Callable[..., Any] = lambda answer, *inputs: answer(*inputs)
    judge: Callable[..., str] | None = None
    tolerance: float = 1e-4


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, in words for whoever wrote it."""

    right: bool
    words: str

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Foreign:
    """Something an answer must not be: an object of a type of its own, or an error it stopped with."""

    words: str


def seed_of(label: str, student: str, salt: str = "") -> int:
    """The seed of a student's cases of one exercise."""
    return int.from_bytes(hashlib.sha256(f"{label}\n{student}\n{salt}".encode()).digest()[:6])


def check_answer(exercise: Exercise, answer: Any, student: str | None = None) -> Verdict:
    """Run and judge an answer in this process; never raises what the answer raises."""
    if names := replaced_names(answer):
        return Verdict(False, f"{', '.join(names)} is not what it was: restart the kernel and write the answer alone")
    seed = seed_of(exercise.label, os.environ.get(STUDENT_VARIABLE, "") if student is None else student)
    return judge(exercise, collect(exercise, answer, seed), seed)


def collect(exercise: Exercise, answer: Any, seed: int) -> list[Any]:
    """What the answer gives for every case of a seed, as plain data. It sees copies of the inputs and nothing else."""
    found = []
    with without_solutions(answer), kept_random_state():
        for case in exercise.cases(Draw(seed)):
            torch.manual_seed(seed % 2**31)
            found.append(alone(exercise.observe, answer, deepcopy(case.inputs)))
    return found


def judge(exercise: Exercise, found: Sequence[Any], seed: int) -> Verdict:
    """Compare what was collected with the reference; the first case that differs decides the words."""
    cases = list(exercise.cases(Draw(seed)))
    if len(found) != len(cases):
        return Verdict(False, f"{len(found)} of {len(cases)} cases were answered")
    if all(is_nothing(value) for value in found):
        return Verdict(False, "nothing returned yet")
    with kept_random_state():
        for number, (case, value) in enumerate(zip(cases, found, strict=True)):
            if words := fault(exercise, case, value):
                reason = named_mistake(exercise, cases, found, number) or case.hint
                return Verdict(False, f"{case.name}: {words}" + (f"; {reason}" if reason else ""))
    return Verdict(True, f"right: {len(cases)} of {len(cases)} cases")


def fault(exercise: Exercise, case: Case, value: Any) -> str:
    """What is wrong with the answer to one case; empty if nothing is."""
    if isinstance(value, Foreign):
        return value.words
    if exercise.judge is not None:
        return "nothing is returned" if value is None else exercise.judge(case.inputs, value)
    return difference(value, expected_of(exercise.reference, exercise, case), exercise)


def expected_of(reference: Callable[..., Any], exercise: Exercise, case: Case) -> Any:
    """What a reference gives for a case, as plain data."""
    torch.manual_seed(0)
    return plain(exercise.observe(reference, *deepcopy(case.inputs)))


def named_mistake(exercise: Exercise, cases: Sequence[Case], found: Sequence[Any], failing: int) -> str:
    """The words for a known mistake that gives what the answer gave up to the failing case, if possible in all cases."""
    likely = ""
    for words, mistake in exercise.mistakes.items():
        if agrees(exercise, mistake, cases[: failing + 1], found):
            if agrees(exercise, mistake, cases[failing + 1 :], found[failing + 1 :]):
                return words
            likely = likely or words
    return likely


def agrees(exercise: Exercise, mistake: Callable[..., Any], cases: Sequence[Case], found: Sequence[Any]) -> bool:
    """Whether a known mistake gives what an answer gave."""
    for case, value in zip(cases, found, strict=False):
        try:
            expected = expected_of(mistake, exercise, case)
        except Exception:  # a mistake need not survive every case
            return False
        if isinstance(value, Foreign) or difference(value, expected, exercise):
            return False
    return True


def is_nothing(value: Any) -> bool:
    """Whether the stub stands as it was."""
    return value is None or (isinstance(value, Foreign) and value.words == "NotImplementedError")


# ---------------------------------------------------------------------------------------------------- running an answer


def alone(observe: Callable[..., Any], answer: Any, inputs: tuple[Any, ...]) -> Any:
    """Call an answer in a thread, so that the frames above it hold nothing of the check; what it raises becomes words."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(plain(observe(answer, *inputs)))
        except NotImplementedError:
            box.append(Foreign("NotImplementedError"))
        except RecursionError:
            box.append(Foreign("it calls itself without an end"))
        except BaseException as error:  # SystemExit and the like end the thread, never the check
            box.append(Foreign(stopped_with(error, answer)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    return box[0]


def stopped_with(error: BaseException, answer: Any) -> str:
    """An error in words, with the line of the answer it came from."""
    line, trace = "", error.__traceback__
    code = getattr(answer, "__code__", None)
    while trace is not None:
        if trace.tb_frame.f_code is code and code is not None:
            line = f" in line {trace.tb_lineno - code.co_firstlineno + 1} of your function"
        trace = trace.tb_next
    first = (str(error).strip().splitlines() or [""])[0][:160]
    return f"it stops with {type(error).__name__}{line}" + (f" ({first})" if first else "")


@contextmanager
def without_solutions(answer: Any) -> Iterator[None]:
    """Take the solutions out of the namespace of an answer while it runs."""
    names = getattr(answer, "__globals__", None)
    if not isinstance(names, dict):  # a class
        names = vars(sys.modules.get(getattr(answer, "__module__", ""), types.ModuleType("none")))
    hidden = {
        name: names.pop(name) for name in list(names) if name.lower().endswith("solution") and names[name] is not answer
    }
    try:
        yield
    finally:
        names.update(hidden)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave the global random numbers as they were."""
    state, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 - an answer may draw from it
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numbers)  # noqa: NPY002


def replaced_names(answer: Any) -> list[str]:
    """Names of libraries, and of the check, behind which a function from the answer's own namespace stands."""
    own = getattr(answer, "__globals__", None)
    if own is None:
        return []
    import itm_lab.teaching.checks as checks

    rooms = {"torch": torch, "torch.Tensor": Tensor, "torch.nn.functional": nn.functional, "numpy": np, "math": math}
    return [
        f"{room}.{name}".removeprefix("builtins.")
        for room, owner in (rooms | {"builtins": builtins, "checks": checks}).items()
        for name, value in list(vars(owner).items())
        if isinstance(value, types.FunctionType) and value.__globals__ is own
    ]


# --------------------------------------------------------------------------------------------------- reading a result


def plain(value: Any) -> Any:
    """Tensors, arrays and numbers of any type as float64, boolean or text data; anything else is Foreign.

    Types are compared exactly: a type of the answer's own may say that it equals everything.
    """
    kind = type(value)
    if value is None or value is ...:
        return None
    if kind in _numbers or kind is Foreign:
        return value
    if kind in _tensor_types:
        value = _detach(value)
        value = _numpy(
            _to(
                value.to_dense() if value.is_sparse else value,
                "cpu",
                torch.float64 if value.is_floating_point() else value.dtype,
            )
        )
        kind = type(value)
    if kind.__module__ == "numpy" and isinstance(value, np.generic):
        value, kind = _array(value), np.ndarray
    if kind is np.ndarray:
        if value.dtype.kind in "fiub":
            return value if value.dtype.kind == "b" else value.astype(np.float64)
        return Foreign(f"an array of type {value.dtype}, expected numbers")
    if kind in (tuple, list):
        return [plain(part) for part in value]
    if kind in (set, frozenset):
        return {part if type(part) in _numbers else tuple(part) for part in value}
    if kind is dict:
        return {str(name): plain(part) for name, part in value.items()}
    return Foreign(f"an object of type {printable_name(kind)}, expected a tensor, an array or a number")


def printable_name(kind: type) -> str:
    name = type.__getattribute__(kind, "__name__")
    return name[:40] if type(name) is str else "?"


def difference(value: Any, expected: Any, exercise: Exercise) -> str:
    """How a plain value differs from the expected one, in words; empty if it does not."""
    if isinstance(value, Foreign):
        return value.words
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            return f"you return {shown(value)}"
        for name, part in expected.items():
            if words := difference(value[name], part, exercise):
                return f"{name}: {words}"
        return ""
    if isinstance(expected, list):
        return difference_of_parts(value, expected, exercise)
    if expected is None or isinstance(expected, bool | str | set):
        same = type(value) is type(expected) and value == expected
        return "" if same else f"you say {shown(value)}, it is {shown(expected)}"
    if value is None:
        return "nothing is returned"
    return difference_of_numbers(value, expected, exercise)


def difference_of_parts(value: Any, expected: list[Any], exercise: Exercise) -> str:
    """Compare a tuple part by part."""
    if isinstance(value, np.ndarray) and value.ndim and len(value) == len(expected):
        value = list(value)
    if not isinstance(value, list) or len(value) != len(expected):
        found = f"{len(value)} values" if isinstance(value, list) else "one value"
        return f"{found} returned, expected {len(expected)}" + (f": {exercise.shape}" if exercise.shape else "")
    for number, (part, wanted) in enumerate(zip(value, expected, strict=True), start=1):
        if words := difference(part, wanted, exercise):
            return f"value {number} of {len(expected)}: {words}"
    return ""


def difference_of_numbers(value: Any, expected: Any, exercise: Exercise) -> str:
    """Compare numbers and arrays of numbers."""
    wanted = _array(expected)
    if isinstance(value, str | set | dict):
        return f"you return {shown(value)}, expected numbers"
    if isinstance(value, bool) and wanted.dtype.kind != "b":
        return f"you say {value}, expected a number: {shown(expected)}"
    if isinstance(value, list):
        inner = next((part.words for part in flat(value) if isinstance(part, Foreign)), None)
        try:
            found = _array(
                [part.tolist() if isinstance(part, np.ndarray) else part for part in value], dtype=np.float64
            )
        except (TypeError, ValueError):
            return inner or "a list that is no array of numbers"
    else:
        found = _array(value)
    if found.size == wanted.size == 1:
        found = found.reshape(wanted.shape)
    if found.shape != wanted.shape:
        return shape_fault(found.shape, wanted.shape, exercise.shape)
    if wanted.dtype.kind == "b":
        if found.dtype.kind != "b" and not ((found == 0) | (found == 1)).all():
            return "not all values are True or False"
        return differing(found.astype(bool), wanted, found.astype(bool) != wanted)
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    if np.isnan(found).any() and not np.isnan(wanted).any():
        return "there is a NaN"
    with np.errstate(invalid="ignore"):
        scale = max(1e-3, float(_abs(wanted[_isfinite(wanted)]).max())) if _isfinite(wanted).any() else 1.0
        wrong = ~((found == wanted) | (_abs(found - wanted) <= exercise.tolerance * scale))
    return differing(found, wanted, wrong)


def flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from flat(value)
        else:
            yield value


def shape_fault(found: tuple[int, ...], wanted: tuple[int, ...], names: str) -> str:
    """Two shapes that differ, and how one comes from the other."""
    words = f"shape {found}, it should be {wanted}" + (f": {names}" if names else "")
    if len(found) > 1 and found[::-1] == wanted:
        return f"{words}; rows and columns are exchanged"
    if len(found) < len(wanted) and [n for n in wanted if n != 1] == [n for n in found if n != 1]:
        return f"{words}; an axis of length 1 is to stay"
    return words


def differing(found: np.ndarray, wanted: np.ndarray, wrong: np.ndarray) -> str:
    """Where two arrays of one shape differ, and by which simple relation if there is one."""
    if not wrong.any():
        return ""
    place = tuple(int(n) for n in _where(wrong)[0]) if wrong.ndim else ()
    at = f"at {list(place)} " if place else ""
    words = f"{at}you say {shown(found[place])}, it is {shown(wanted[place])}"
    if wrong.size > 1:
        words += f" ({int(wrong.sum())} of {wrong.size} values differ)"
    return words + relation(found, wanted)


def relation(found: np.ndarray, wanted: np.ndarray) -> str:
    """A simple relation between two arrays of numbers: exchanged, one factor, one offset, inverted."""
    if wanted.dtype.kind == "b":
        return "; every decision is the opposite" if (found != wanted).all() and wanted.size > 1 else ""
    if not (_isfinite(found).all() and _isfinite(wanted).all()):
        return ""
    near = 1e-4 * max(1e-3, float(_abs(wanted).max()))
    if wanted.ndim == 2 and wanted.shape[0] == wanted.shape[1] and (_abs(found.T - wanted) <= near).all():
        return "; rows and columns are exchanged"
    if not found.any():
        return "; all of yours are 0" if wanted.size > 1 else ""
    factor = float((found * wanted).sum() / max((wanted * wanted).sum(), 1e-30)) or 1.0
    telling = wanted.size > 1 or min(abs(factor - round(factor)), abs(1 / factor - round(1 / factor))) < 1e-4
    if wanted.any() and telling and (_abs(found - factor * wanted) <= near).all():
        return "; the sign is wrong" if abs(factor + 1) < 1e-3 else f"; yours is {factor:.4g} times as large"
    offset = float((found - wanted).mean())
    if wanted.size > 1 and (_abs(found - wanted - offset) <= near).all():
        return f"; all of yours are {abs(offset):.4g} too {'large' if offset > 0 else 'small'}"
    return ""


def shown(value: Any) -> str:
    """A short form of a plain value."""
    if isinstance(value, Foreign):
        return value.words
    if isinstance(value, np.ndarray):
        value = value.item() if value.size == 1 else f"an array of shape {value.shape}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, set):
        return "{" + ", ".join(sorted(map(str, value))[:6]) + "}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:80]

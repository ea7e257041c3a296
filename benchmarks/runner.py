"""Ratios of processor time, taken in turns: how they are measured, kept and compared.

A case holds several ways to do the same work: ours, the straightforward one, the machine's own matrix product. All run
in one process on one thread and take turns, A/B/A/B, so that a busy minute of the machine hits all of them; what
counts is the median over the rounds of the ratio within a round. A ratio that is 20 % worse than the committed one
is a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks.harness import peak_beyond, timed

TOLERATED = 0.2  # a ratio may be this share worse than the committed one: a shared machine has such minutes
LEAST_SECONDS = 0.1  # of a way in a round; what is faster is repeated
Way = Callable[[], Any]


class Absent(Exception):
    """What a case needs and this machine does not have."""


@dataclass(frozen=True)
class Ratio:
    """One number that the book claims.

    over, under: the two ways whose times are divided. target: what we aim at, or None. lower: whether a smaller number
    is better, as in *times the matrix product*.
    """

    name: str
    over: str
    under: str
    target: float | None = None
    lower: bool = False

    def worse(self, committed: float, measured: float) -> bool:
        """Whether a measured ratio is more than 20 % worse than the committed one."""
        if self.lower:
            return measured > committed * (1 + TOLERATED)
        return measured < committed * (1 - TOLERATED)

    def reached(self, measured: float) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        return measured <= self.target if self.lower else measured >= self.target


def faster(name: str, target: float | None = None, than: str = "straightforward", by: str = "ours") -> Ratio:
    """How many times faster ours is."""
    return Ratio(name, than, by, target)


def times(name: str, target: float | None = None, of: str = "product", by: str = "ours") -> Ratio:
    """How many times the bare work ours takes: one is the least there can be."""
    return Ratio(name, by, of, target, lower=True)


@dataclass(frozen=True)
class Work:
    """The ways of a case at one size.

    scale: how many times the work of ours a way leaves out, for ways too slow to do all of it. outputs: ways that
    must agree with ours to ``tolerance``, which are compared before anything is timed; relative: to the largest number
    of ours. given: seconds of ways that are not run, as the second that commands are compared with. clock: seconds that
    a job takes.
    """

    ways: Mapping[str, Way]
    scale: Mapping[str, float] = field(default_factory=dict)
    outputs: Mapping[str, Way] = field(default_factory=dict)
    tolerance: float = 1e-4
    relative: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, float] = field(default_factory=dict)
    clock: Callable[[Way], float] = timed


@dataclass(frozen=True)
class Case:
    """Some ratios that are measured together.

    build: the work at a size. sizes: by name, "full" for the receipt and "tiny" for a trial. growth: further sizes of
    which ``grown`` ways are timed: with the full one, the curves of the page.
    """

    name: str
    group: str
    what: str
    build: Callable[..., Work]
    ratios: tuple[Ratio, ...]
    full: Mapping[str, int]
    tiny: Mapping[str, int]
    rounds: int = 5
    growth: tuple[Mapping[str, int], ...] = ()
    grown: tuple[str, ...] = ("ours",)


def measure(case: Case, size: Mapping[str, int], rounds: int) -> dict[str, Any]:
    """Everything a receipt says of one case: ratios with their spread, seconds, peak memory, largest difference."""
    torch.manual_seed(0)
    work = case.build(**size)
    difference = check_outputs(case.name, work)
    peak, repeats = {}, {}
    for name, way in work.ways.items():  # and everything is warm
        first: list[float] = []
        peak[name] = peak_beyond(lambda way=way, first=first: first.append(work.clock(way)))
        repeats[name] = repetitions(first[0] if first else work.clock(way))
    seconds: dict[str, list[float]] = {name: [] for name in work.ways}
    seconds |= {name: [spent] * rounds for name, spent in work.given.items()}
    for _ in range(rounds):
        for name, way in work.ways.items():
            spent = work.clock(lambda way=way, n=repeats[name]: [way() for _ in range(n)])
            seconds[name].append(work.scale.get(name, 1.0) * spent / repeats[name])
    ratios = {ratio.name: ratio_of(ratio, seconds) for ratio in case.ratios}
    return {
        "group": case.group,
        "what": case.what,
        "size": dict(size),
        "rounds": rounds,
        "ratios": ratios,
        "seconds": {name: median(values) for name, values in seconds.items()},
        "peak_bytes": peak,
        "largest_difference": difference,
        "facts": dict(work.facts),
    }


def ratio_of(ratio: Ratio, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Median and extremes of a ratio over the rounds."""
    values = [over / under for over, under in zip(seconds[ratio.over], seconds[ratio.under], strict=True)]
    found = {"ratio": median(values), "lowest": min(values), "highest": max(values), "lower_is_better": ratio.lower}
    return found | {"target": ratio.target, "over": ratio.over, "under": ratio.under}


def check_outputs(name: str, work: Work) -> float | None:
    """Largest difference between the ways' outputs; an error if they do not do the same work."""
    if not work.outputs:
        return None
    first, *others = (torch.as_tensor(way()) for way in work.outputs.values())
    difference = max((float((other - first).abs().max()) for other in others), default=0.0)
    if work.relative:
        difference /= float(first.abs().max())
    if not difference <= work.tolerance:
        raise SystemExit(f"{name}: the ways differ by {difference:.2g}, more than {work.tolerance:.2g}: nothing timed")
    return difference


def repetitions(seconds: float) -> int:
    """How often a way of so many seconds runs in a round, so that the clock can see it."""
    return max(1, round(LEAST_SECONDS / max(seconds, 1e-4)))


def grow(case: Case) -> Iterator[dict[str, Any]]:
    """Seconds and peak memory of some ways at growing sizes."""
    for size in case.growth:
        torch.manual_seed(0)
        work = case.build(**size)
        ways = {name: work.ways[name] for name in case.grown}
        peak = {name: peak_beyond(way) for name, way in ways.items()}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(3):
            for name, way in ways.items():
                seconds[name].append(work.scale.get(name, 1.0) * timed(way))
        middle = {name: median(values) for name, values in seconds.items()}
        yield {"size": dict(size), "seconds": middle, "peak_bytes": peak, "facts": dict(work.facts)}


def compare(
    cases: Mapping[str, Case], measured: Mapping[str, Any], committed: Mapping[str, Any]
) -> Iterator[tuple[str, float, float | None, bool]]:
    """Every measured ratio: its name, its value, the committed one, and whether it fails."""
    for name, found in measured.items():
        if "absent" in found:
            continue
        known = committed.get(name, {}).get("ratios", {})
        for ratio in cases[name].ratios:
            value, before = found["ratios"][ratio.name]["ratio"], known.get(ratio.name, {}).get("ratio")
            yield f"{name}: {ratio.name}", value, before, before is not None and ratio.worse(before, value)


def run(
    cases: Mapping[str, Case], quick: bool, rounds: int | None = None, growth: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure the cases one after the other."""
    for name, case in cases.items():
        began = time.perf_counter()
        try:
            found = measure(case, case.tiny if quick else case.full, rounds or (1 if quick else case.rounds))
        except Absent as lack:
            yield name, {"group": case.group, "what": case.what, "ratios": {}, "absent": str(lack)}
            continue
        if growth and not quick and case.growth:
            found["growth"] = list(grow(case))
        found["wall_seconds"] = round(time.perf_counter() - began, 1)
        yield name, found

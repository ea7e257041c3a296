"""Exercises: wrong answers get words, right ones pass in any style, no trick works, nothing breaks off."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import bank
import numpy as np
import pytest
import torch
from mutants import mutants
from nbformat import NotebookNode

from itm_lab.classroom.answering import definitions, packed, unpacked
from itm_lab.notebook_io import find_notebooks, is_chapter, read_notebook
from itm_lab.publish.exercise_cells import ExerciseCells, exercises_of
from itm_lab.teaching.checks import STUDENT_VARIABLE, Foreign, check_answer, collect, judge
from itm_lab.teaching.exercises import all_exercises, check, find_exercise
from itm_utils.errors import ItmError

ROOT = Path(__file__).resolve().parents[3]
bank.fill()
LABELS = sorted(all_exercises())
WRONG = [(label, answer, says) for label in LABELS for answer, says in bank.WRONG[label]]


# Changes after which an answer is as right as before; a pattern of the changed source.
EQUIVALENT = {
    "ex-forgotten-mask": r"words\)\.sum\(dim=1\)",  # unit norm follows
    "ex-sgraf-gate": r"nodes\)\.mean\(dim=1\)",  # unit norm follows
    "ex-vsrn-axis": r"randn\((?!4, 5, 6, gen.*seed\(0\))|atol=0\)",  # any tensor will do
}


@cache
def chapters() -> dict[str, NotebookNode]:
    return {path.stem: read_notebook(path) for path in filter(is_chapter, find_notebooks(ROOT))}


@cache
def cells() -> dict[str, tuple[str, ExerciseCells]]:
    """Label → name of the chapter and cells, of every exercise that has code."""
    found = {}
    for name, chapter in chapters().items():
        if any("itm_lab.teaching.exercises" in cell.source for cell in chapter.cells):
            found |= {e.label: (name, e) for e in exercises_of(chapter, name) if e.check is not None}
    return found


@cache
def definitions_of(chapter: str) -> dict[str, object]:
    """What the cells of a chapter define, without its solutions."""
    code = [cell for cell in chapters()[chapter].cells if cell.cell_type == "code"]
    return definitions([cell.source for cell in code if "solution" not in cell["id"]])


def test_the_banks_are_full() -> None:
    assert set(bank.RIGHT) == set(bank.WRONG) == set(LABELS)
    assert min(len(answers) for answers in bank.RIGHT.values()) >= 3
    assert min(len(answers) for answers in bank.WRONG.values()) >= 8


@pytest.mark.parametrize("label", LABELS)
def test_right_answers_pass(label: str) -> None:
    for student in ("", "ada"):
        for answer in [find_exercise(label).reference, *bank.RIGHT[label]]:
            verdict = check(label, answer, student)
            assert verdict.right, f"{answer}: {verdict}"


@pytest.mark.parametrize("label", LABELS)
def test_wrong_answers_are_told_what_is_wrong(label: str) -> None:
    for answer, says in bank.WRONG[label]:
        verdict = check(label, answer)
        line = getattr(getattr(answer, "__code__", None), "co_firstlineno", "")
        assert not verdict.right, f"{answer} in line {line} is accepted"
        assert re.search(says, verdict.words), f"{answer} in line {line}: {says!r} is not in: {verdict}"


def test_a_named_mistake_is_never_a_right_answer() -> None:
    for label, exercise in all_exercises().items():
        for words, mistake in exercise.mistakes.items():
            verdict = check(label, mistake)
            assert not verdict.right, f"{label}: {words}"


class EqualsEverything:
    """Says yes to all that a check could ask."""

    shape = (2,)

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: self


class EqualTensor(torch.Tensor):
    """A tensor that is close to everything."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return True


HOSTILE = (
    EqualsEverything(),
    EqualTensor(),
    "right",
    [[1, 2], [3]],
    {"a": 1},
    {1, 2},
    object,
    iter(()),
    1j,
    float("nan"),
    torch.full((3, 4), torch.nan),
    torch.tensor([1j]),
    np.array(["a"]),
    np.array([object()], dtype=object),
    [torch.zeros(2), None, "x"],
    ([], ()),
    True,
    2**70,
)


@pytest.mark.parametrize("label", LABELS)
def test_nothing_that_is_returned_or_raised_breaks_a_check(label: str) -> None:
    for value in HOSTILE:
        assert not check(label, lambda *inputs, value=value: value).right
    for error in (SystemExit, KeyboardInterrupt, RecursionError, AssertionError("right"), NotImplementedError):

        def raises(*inputs, error=error):
            raise error

        assert not check(label, raises).right
    for answer in (None, 3, "check", EqualsEverything()):
        assert not check(label, answer).right


def share_mean_solution(values, mask, share):
    return find_exercise("ex-dcpa-few").reference(values, mask, share)


def reads_the_solution(values, mask, share):
    return globals()["share_mean_solution"](values, mask, share)


def names_the_solution(values, mask, share):
    return share_mean_solution(values, mask, share)


def looks_into_frames(values, mask, share):
    import sys

    frame = sys._getframe()
    while frame is not None:
        for found in frame.f_locals.values():
            if hasattr(found, "reference"):
                return found.reference(values, mask, share)
        frame = frame.f_back
    return None


def changes_its_inputs(values, mask, share):
    values.fill_(1.0)
    mask.fill_(True)
    return torch.ones(len(values))


def returns_an_equal_thing(values, mask, share):
    return EqualsEverything()


def catches_everything(values, mask, share):
    try:
        raise AssertionError
    except BaseException:
        return None


@pytest.mark.parametrize(
    "trick",
    [
        reads_the_solution,
        names_the_solution,
        looks_into_frames,
        changes_its_inputs,
        returns_an_equal_thing,
        catches_everything,
    ],
    ids=lambda trick: trick.__name__,
)
def test_no_trick_works_in_a_check_cell(trick) -> None:
    assert not check("ex-dcpa-few", trick).right
    assert check("ex-dcpa-few", bank.RIGHT["ex-dcpa-few"][0]).right
    assert share_mean_solution is globals()["share_mean_solution"], "names are given back"


@pytest.mark.parametrize("name", ["allclose", "isclose", "equal", "as_tensor"])
def test_a_replaced_function_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def yes(*args, **kwargs):
        return True

    def answer(values, mask, share):
        return torch.zeros(len(values))

    monkeypatch.setattr(torch, name, yes)
    verdict = check("ex-dcpa-few", answer)
    assert not verdict.right
    assert "restart the kernel" in verdict.words


def test_a_replaced_check_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import itm_lab.teaching.checks as checks

    monkeypatch.setattr(checks, "difference", lambda *args: "")
    assert not check("ex-dcpa-few", changes_its_inputs).right


def test_each_student_has_cases_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    exercise, answers = find_exercise("ex-ccr-f1"), []
    for student in ("ada", "bob", "ada"):
        monkeypatch.setenv(STUDENT_VARIABLE, student)
        seen = []
        check_answer(exercise, lambda *inputs, seen=seen: seen.append(inputs[0]))
        answers.append(seen[-1])
    assert not torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_answers_leave_random_numbers_and_inputs_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for answer, _ in bank.WRONG["ex-ccr-strangers"][:2]:
        check("ex-ccr-strangers", answer)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("label", LABELS)
def test_answers_survive_the_way_to_another_process(label: str) -> None:
    exercise = find_exercise(label)
    for answer, right in [(bank.RIGHT[label][0], True), (bank.WRONG[label][1][0], False)]:
        found = collect(exercise, answer, 7)
        assert judge(exercise, [unpacked(packed(value)) for value in found], 7).right == right


@pytest.mark.parametrize("value", [None, 3, {}, {"array": [2], "kind": "O", "data": []}, {"value": []}, {"list": 3}])
def test_what_cannot_be_read_is_no_answer(value: object) -> None:
    assert isinstance(unpacked(value), Foreign)


def test_chapters_and_exercises_agree() -> None:
    assert set(cells()) <= set(LABELS)
    for name, chapter in chapters().items():
        exercises = [e for e in cells().values() if e[0] == name]
        if not exercises:
            continue
        levels = [e.level for _, e in exercises]
        assert {"easy", "solid", "hard"} <= set(levels), name
        assert levels == sorted(levels, key=("easy", "solid", "hard").index), name
        texts = [e.text.source for e in exercises_of(chapter)]
        assert sum("(reading, " in text for text in texts) == 1, name
        assert any(re.search(r"Build [^.]*\bpart\b", text) for text in texts), name


@pytest.mark.parametrize("label", LABELS)
def test_mutants_of_the_solution_are_rejected(label: str) -> None:
    if label not in cells():
        pytest.skip("its chapter does not set it yet")
    chapter, exercise = cells()[label]
    source = exercise.solution.source.split("\n\n\nprint(")[0]
    survivors, number = [], 0
    for mutant in mutants(source):
        if label in EQUIVALENT and re.search(EQUIVALENT[label], mutant):
            continue
        number += 1
        space = dict(definitions_of(chapter))
        exec(mutant, space)
        answer = next(value for name, value in space.items() if name.lower().endswith("solution"))
        if check(label, answer).right:
            survivors.append(mutant)
    assert number >= 3
    assert len(survivors) <= 0.1 * number, "\n\n".join(survivors)


def test_an_unknown_exercise_is_one_clear_error() -> None:
    with pytest.raises(ItmError, match="ex-none"):
        check("ex-none", print)

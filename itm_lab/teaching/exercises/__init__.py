"""The exercises of the chapters: for each a slow reference, its cases and the mistakes that have words of their own.

Text, stub and solution of an exercise stand in its chapter.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from itm_lab.teaching.checks import Exercise, Verdict, check_answer
from itm_utils.errors import input_error


@cache
def all_exercises() -> dict[str, Exercise]:
    """Label → exercise, of every chapter."""
    modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {exercise.label: exercise for module in modules for exercise in module.EXERCISES}


def find_exercise(label: str) -> Exercise:
    """The exercise of a label."""
    if label not in all_exercises():
        raise input_error("check", f"the exercise {label!r}", f"one of {', '.join(all_exercises())}")
    return all_exercises()[label]


def check(label: str, answer: Any, student: str | None = None) -> Verdict:
    """Whether an answer is right, in words. student: whose cases are drawn; otherwise that of ITM_STUDENT."""
    return check_answer(find_exercise(label), answer, student)

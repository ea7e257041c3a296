"""The matchers that every generic test goes through, a few units wide."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import itm_utils.models
from itm_utils.matcher import Matcher

TOKEN_DIM = 12  # width of the toy token states


def exported(kind: type | None = None) -> list:
    """Every class or function that the chapters export, optionally only subclasses of ``kind``."""
    found = []
    for module in pkgutil.iter_modules(itm_utils.models.__path__):
        loaded = importlib.import_module(f"itm_utils.models.{module.name}")
        for value in vars(loaded).values():
            if getattr(value, "__module__", None) != loaded.__name__:
                continue
            if kind is None or (inspect.isclass(value) and issubclass(value, kind)):
                found.append(value)
    return found


def whole_matchers() -> list[type[Matcher]]:
    """Exported matchers that are built by their own constructor and are no base of another: the models of the book."""
    found = [matcher for matcher in exported(Matcher) if matcher.__init__ is not Matcher.__init__]
    return [matcher for matcher in found if not any(o is not matcher and issubclass(o, matcher) for o in found)]


def small(matcher: type[Matcher], vocabulary_size: int, image_dim: int, **options: Any) -> Matcher:
    """A matcher of a few units, built from the arguments that all of them share, and ``options`` of its own."""
    takes = inspect.signature(matcher).parameters
    reads_words = "vocabulary_size" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
    texts = {"vocabulary_size": vocabulary_size} if reads_words else {}
    texts |= {"token_dim": TOKEN_DIM} if "token_dim" in takes else {}
    if "intra" in takes:  # a model of two stages: sizes belong to the stages
        stage = {"token_dim": TOKEN_DIM, "width": 8, "heads": 2, "feed_forward": 8}
        stages = {name: stage | options.pop(name, {}) for name in ("intra", "inter")}
        return matcher(image_dim=image_dim, **stages, **options)
    heads = {"heads": 2} if "heads" in takes else {}
    return matcher(image_dim=image_dim, **({"width": 8} | heads | texts | options))

"""Scenes: a synthetic dataset of toys, drawn, described and grounded.

``scenes_folder()`` is a dataset in the precomputed format (built on first use), ``load_scenes(split)`` what only
this dataset has: symbolic scenes, images, twins; ``oracle_matrix(split)`` which captions are true of which
images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from itm_lab.scenes.build import ScenesSpec, scenes_folder
    from itm_lab.scenes.load import SceneSplit, load_scenes, oracle_matrix

_HOME = {
    "ScenesSpec": "build",
    "scenes_folder": "build",
    "SceneSplit": "load",
    "load_scenes": "load",
    "oracle_matrix": "load",
}

__all__ = ["SceneSplit", "ScenesSpec", "load_scenes", "oracle_matrix", "scenes_folder"]


def __getattr__(name: str) -> Any:
    """Import on first use: the generator itself needs no torch, and neither does ``itm --help``."""
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(f"itm_lab.scenes.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

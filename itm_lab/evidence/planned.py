"""Which seeds the experiment files plan for a variant: a comparison takes these, all of them and no others."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from itm_lab.experiments.experiment_files import expand, read_seeds, twin_seeds

Plan = Mapping[tuple[str, str, str], tuple[int, ...]]  # (chapter, variant, dataset) → seeds
FIVE_K = " 5K"  # COCO's second protocol: scored from the same runs as the first


def planned_seeds(root: Path) -> Plan:
    """The seeds of every variant, and of every ensemble, that says ``seeds`` in its experiment file.

    Only the files are read, not the notebooks that check their parameters. A mean of twins has the seeds of the first of
    them. The members of an ensemble that plan
    different seeds share those that all of them plan.
    """
    found: dict[tuple[str, str, str], tuple[int, ...]] = {}
    for notebook in sorted((root / "notebooks").glob("[0-9]*.ipynb")):
        path = root / "experiments" / f"{notebook.stem.partition('_')[2]}.yaml"
        if path.is_file():
            found |= _of_file(path, notebook.stem, path.stat().st_mtime_ns)
    return found


def seeds_of(plan: Plan, chapter: str, variant: str, dataset: str) -> tuple[int, ...] | None:
    """The planned seeds of a variant on a dataset of the ledger; None where no file plans any."""
    return plan.get((chapter, variant, dataset.removesuffix(FIVE_K)))


def variant_of_experiment(root: Path, name: str) -> str | None:
    """The variant of an experiment ``<chapter>/<dataset>/<key>``; None where there is no such experiment."""
    chapter, _, place = name.partition("/")
    if not (path := root / "experiments" / f"{chapter}.yaml").is_file():
        return None
    return _names(path, path.stat().st_mtime_ns).get(place)


@cache
def _names(path: Path, changed: int) -> dict[str, str]:
    """``<dataset>/<key>`` → variant, of one file; read again only if it has changed."""
    return {f"{dataset}/{key}": str(given["variant"]) for dataset, key, given in expand(path) if "variant" in given}


@cache
def _of_file(path: Path, chapter: str, changed: int) -> dict[tuple[str, str, str], tuple[int, ...]]:
    """The plan of one file; read again only if it has changed."""
    found: dict[tuple[str, str, str], tuple[int, ...]] = {}
    for dataset, _, given in expand(path):
        if seeds := _seeds(given):
            for name in filter(None, (given.get("variant"), given.get("ensemble"))):
                key = chapter, str(name), dataset
                found[key] = tuple(seed for seed in found.get(key, seeds) if seed in seeds)
            if name := given.get("twins"):
                found[chapter, str(name), dataset] = tuple(twin_seeds(seeds))
    return found


def _seeds(given: Mapping[str, Any]) -> tuple[int, ...]:
    """The seeds that an experiment says; none where it says none."""
    return tuple(read_seeds(str(given["seeds"]))) if given.get("seeds") not in (None, "") else ()

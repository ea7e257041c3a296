"""What every table of the papers needs, takes and leaves on disk: written to a file by a command, shown by a page.

Nothing of this machine is in the file: needs are those of a checkout without data, sizes are the published ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from itm_lab.experiments.choice import search_runs
from itm_lab.experiments.cost import GPUS, USED, Costs
from itm_lab.experiments.experiment_files import read_experiments
from itm_lab.experiments.needs import PLANNED, Plan
from itm_lab.experiments.plan import plan, plan_searches
from itm_lab.experiments.runner import Job
from itm_lab.publish.markdown import table
from itm_lab.records.nested_yaml import load_yaml
from itm_utils.files import read_text, write_text

FILE = "book/data/requirements.yaml"
GPU = "RTX 3090"
HEADS = ["table", "rows", "runs", "needs", "hours", "disk", "GPU memory"]
RECIPE_HEADS = ["recipe", "tables", "needs", "hours", "disk", "GPU memory"]


@contextmanager
def bare_checkout(root: Path) -> Iterator[Path]:
    """A checkout with chapters and experiments alone: no data, no runs, no receipts."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("notebooks", "experiments", "pyproject.toml"):
            (Path(folder) / name).symlink_to((root / name).resolve())
        yield Path(folder)


def paper_tables(root: Path) -> dict[str, list[str]]:
    """Table → its experiments at paper size, in the order of the files."""
    found: dict[str, list[str]] = {}
    for name, experiment in read_experiments(root).items():
        if experiment.settings["schedule"] == "paper":
            for one in experiment.tables:
                found.setdefault(one, []).append(name)
    return found


def runs_of(root: Path, names: list[str], title: str) -> list[Job]:
    """The runs of a table, or of one experiment: the searches that come first, then one run each with its own seed."""
    asked = (root, [] if title else names, title)
    searches = search_runs(plan_searches(*asked, [], root / "receipts"), root / "receipts")
    return [*searches, *plan(*asked, "", [], [], [], root / "receipts")]


def needed(jobs: list[Job]) -> list[str]:
    """What must come from elsewhere: what the runs make themselves is left out."""
    needs = Plan(jobs, jobs[0].root / "receipts").needs()
    return list(dict.fromkeys(need.what for need in needs if need.state != PLANNED))


def requirements(root: Path, costs: Costs | None = None) -> dict[str, Any]:
    """Table and recipe → rows, runs, needs; with costs also hours, gigabytes and GPU memory."""
    with bare_checkout(root) as bare:
        tables = paper_tables(bare)
        recipes = list(dict.fromkeys(name for names in tables.values() for name in names))
        found: dict[str, Any] = {"gpu": GPU, "peak_tera_operations": GPUS[GPU][0], "share_of_peak": USED}
        found["tables"] = {
            title: {"rows": len(names)} | described(runs_of(bare, names, title), costs)
            for title, names in tables.items()
        }
        found["recipes"] = {
            name: {"tables": [title for title in tables if name in tables[title]]}
            | described(runs_of(bare, [name], ""), costs)
            for name in recipes
        }
    return found


def described(jobs: list[Job], costs: Costs | None) -> dict[str, Any]:
    """Runs in numbers."""
    found: dict[str, Any] = {"runs": len(jobs), "needs": needed(jobs)}
    if costs is not None:
        seconds, size = costs.together(jobs)
        held = max(costs.of(job).held for job in jobs)
        found |= {
            "hours": round(seconds / 3600, 1),
            "gigabytes": round(size / 1e9, 1),
            "gpu_gib": round(held / 2**30, 1),
        }
    return found


def write_requirements(root: Path) -> Path:
    """Count everything and write the file that the page reads."""
    text = yaml.safe_dump(requirements(root, Costs(GPU)), sort_keys=False, width=1000, default_flow_style=None)
    write_text(root / FILE, f"# Written by `itm recipe --requirements`.\n{text}")
    return root / FILE


def fragment(root: Path) -> Iterator[str]:
    """The generated part of the page, as MyST text."""
    found = load_yaml(read_text(root / FILE, "what `itm recipe --requirements` writes"))
    yield (
        f"Hours are **estimates**: the matrix products of every training step, validation and test are counted, and divided "
        f"by {found['share_of_peak']:.0%} of the {found['peak_tera_operations']} · 10¹² operations a second that the maker of "
        f"one {found['gpu']} states as its peak. That share is a guess; `itm run … --dry-run --measure` replaces it by steps "
        f"timed on your machine, and nothing on this page is measured. Each recipe is taken with one seed.\n"
    )
    for chapter in dict.fromkeys(title.partition("/")[0] for title in found["tables"]):
        tables = {title: one for title, one in found["tables"].items() if title.startswith(f"{chapter}/")}
        yield f"## {chapter}\n"
        yield from table(
            HEADS, [[f"`{title}`", str(one["rows"]), str(one["runs"]), *cells(one)] for title, one in tables.items()]
        )
        yield "````{dropdown} Recipe by recipe"
        recipes = {name: one for name, one in found["recipes"].items() if name.startswith(f"{chapter}/")}
        yield from table(
            RECIPE_HEADS, [[f"`{name}`", listed(one["tables"]), *cells(one)] for name, one in recipes.items()]
        )
        yield "````\n"


def cells(one: Mapping[str, Any]) -> list[str]:
    """Needs, hours, disk and memory as cells of a table."""
    return [listed(one["needs"]), f"{one['hours']:,}", f"{one['gigabytes']:,} GB", f"{one['gpu_gib']} GiB"]


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

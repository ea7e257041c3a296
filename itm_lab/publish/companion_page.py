"""The companion of a chapter: readings, parity, searches, every comparison, all parameters, costs.

Nothing on it is typed into the page: readings are data, the rest comes from reference cases, experiment files, recorded
choices, receipts, the notebook and the benchmarks as they are when the book is built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from itm_lab.evidence.ledger import Ledger
from itm_lab.experiments.choice import Selection
from itm_lab.experiments.experiment_files import Experiment, baseline_name, read_experiments
from itm_lab.publish.claims_page import DATASETS, chapter_of, comparison_table, titles
from itm_lab.publish.ledger_pages import open_ledger
from itm_lab.publish.markdown import badge, escape, joined, table
from itm_lab.publish.parity_record import read_record
from itm_lab.records.nested_yaml import load_yaml
from itm_utils.errors import input_error
from itm_utils.files import read_text

READINGS = "book/data/readings.yaml"
HEADS = {"about": "", "paper": "the paper says", "code": "the public code does", "book": "we do", "because": "because"}
PLACES = {"scenes": "Scenes", "flickr8k": "Flickr8k", "f30k": "Flickr30K", "coco": "COCO"}
# The benchmarks that a chapter's work appears in: words of their names.
BENCHMARKS = {"sgraf": ("saf", "sgr"), "aoq": ("aoq", "mining"), "keeping_score": ("recall", "loader"), "ccr_ccs": ("ccr-ccs",)}  # fmt: skip
EACH = "*varies* where they differ, a dash where they leave the value of the page"


def fragment(root: Path, chapter: str) -> Iterator[str]:
    """The page of a chapter (``09_dcpa``) as MyST text, beginning with a heading."""
    notebook = root / f"notebooks/{chapter}.ipynb"
    if not notebook.is_file():
        raise input_error("companion", chapter, "the name of a chapter's notebook")
    short = chapter.partition("_")[2]
    experiments = read_experiments(root, short) if (root / f"experiments/{short}.yaml").is_file() else {}
    yield from readings(root, chapter)
    yield from parity(root, short)
    yield from searches(root, experiments)
    yield from comparisons(open_ledger(root), chapter)
    yield from parameters(notebook, experiments)
    yield from costs(root, chapter)


# ---------------------------------------------------------------------------------------------- readings


def readings(root: Path, chapter: str) -> Iterator[str]:
    """What the paper says, what its public code does, what the book does."""
    rows = load_yaml(read_text(root / READINGS, "the readings of all chapters")).get(chapter)
    if not rows:
        return
    keys = list(rows[0])
    if odd := next((row for row in rows if list(row) != keys), None):
        raise input_error(root / READINGS, f"{chapter}: {odd}", f"the fields {', '.join(keys)}")
    yield "## Readings: paper, public code, this book\n"
    if "code" in keys:
        yield "What the paper leaves open or says otherwise than its code. A dash: nothing is said. The column on the code was checked by running it.\n"
    else:
        yield "We found no public code. What the text leaves open, what we took, and why.\n"
    yield "````{div} wide-table\n"
    yield from table([HEADS[key] for key in keys], ([row[key] for key in keys] for row in rows))
    yield "````\n"


# ---------------------------------------------------------------------------------------------- parity


def parity(root: Path, short: str) -> Iterator[str]:
    """The largest difference from the reference values in every case of the chapter's model."""
    record = read_record(root)
    rows = [row for row in record["rows"] if row["case"].partition("/")[0] in cases_of(short)]
    if not rows:
        return
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in dict.fromkeys(row["kind"] for row in rows)}
    cases = len({row["case"] for row in rows})
    within = all(row["difference"] <= row["allowed"] for row in rows)
    yield "## Parity: the same numbers as the reference cases\n"
    yield (
        f"{cases} reference cases, {sum(row['arrays'] for row in rows)} arrays; "
        f"{'all differences are' if within else 'NOT all differences are'} within the bounds. "
        f"Recorded on {record['finished']} with torch {record['torch']} by `itm parity tests/golden --record`, "
        f"which compares all of them again.\n"
    )
    yield from table(
        ["quantity", "cases", "arrays", "largest difference", "allowed"],
        [
            [kind, len(of), sum(row["arrays"] for row in of), small(max(row["difference"] for row in of)), small(of[0]["allowed"])]
            for kind, of in kinds.items()
        ],
    )  # fmt: skip
    yield "````{dropdown} Case by case"
    lines = [[f"`{row['case']}`", row["kind"], row["arrays"], small(row["difference"])] for row in rows]
    yield from table(["case", "quantity", "arrays", "largest difference"], lines)
    yield "````\n"


def cases_of(short: str) -> set[str]:
    """Folders of reference cases that belong to a chapter."""
    return {
        "keeping_score": {"eval"},
        "aoq": {"aoq", "aoq_variants"},
        "ccr_ccs": {"ccr_ccs", "attention_metrics"},
    }.get(short, {short})


def small(number: float) -> str:
    return "0" if number == 0 else f"{number:.0e}"


# ---------------------------------------------------------------------------------------------- searches


def searches(root: Path, experiments: Mapping[str, Experiment]) -> Iterator[str]:
    """Every search on dev: what it tries, with how many runs, and what it chose where it has run."""
    asked = {name: one for name, one in experiments.items() if one.select is not None}
    if not asked:
        return
    rows = []
    for name, one in asked.items():
        assert one.select is not None
        baseline = experiments.get(baseline_name(one)) if one.search_baseline else None
        search = Selection(one, baseline, {})
        takers = [other for other, of in experiments.items() if name in of.chosen_elsewhere]
        rows.append([f"`{name}`", tried(search), len(search.tried()), *outcome(search, root), len(takers)])
    yield "## Searches\n"
    yield (
        "Settings are chosen on dev with seeds that no table uses. A search over one number goes on beyond the ends of its grid "
        "until the best value lies between two others. The last column: how many other experiments take the same choice.\n"
    )
    yield from table(["experiment", "tries", "runs", "chosen", "best dev rsum", "taken by"], rows)


def tried(search: Selection) -> str:
    """The grid of a search, and what its runs have besides."""
    select = search.select
    if select.settings:
        text = "; ".join(", ".join(f"{name} {value}" for name, value in one.items()) for one in select.settings)
    else:
        text = "; ".join(f"`{name}` {', '.join(map(str, values))}" for name, values in select.grid.items())
    shorter = ", ".join(f"{name} {value}" for name, value in select.shorter.items() if value != "")
    return text + f" (with {shorter})" * bool(shorter)


def outcome(search: Selection, root: Path) -> tuple[str, str]:
    """What a recorded search chose and its best result; "not run" where there is no record."""
    path = search.path(root / "receipts")
    if (chosen := search.recorded(root / "receipts")) is None:
        return "not run", "–"
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return ", ".join(f"{name} {value}" for name, value in chosen.items()), f"{max(run['rsum'] for run in runs):.1f}"


# ---------------------------------------------------------------------------------------------- comparisons


def comparisons(ledger: Ledger, chapter: str) -> Iterator[str]:
    """Every comparison behind every verdict of the chapter's claims, a fold for each dataset of a claim."""
    claims = ledger.claims | ledger.foundations
    names = [name for name, claim in claims.items() if chapter_of(claim) == chapter]
    if not names:
        return
    yield "## Every comparison behind the verdicts\n"
    shown = {name: list(comparisons_of(ledger, name, titles(ledger)[name])) for name in names}
    if waiting := [f"{{ref}}`{name} <claim-{name.lower()}>`" for name, lines in shown.items() if not lines]:
        yield f"Not run, so without comparisons: {joined(waiting)}.\n"
    yield from chain.from_iterable(shown.values())


def comparisons_of(ledger: Ledger, name: str, title: str) -> Iterator[str]:
    """One claim: its verdict on every dataset that has one, each with its comparisons."""
    decided = [one for one in ledger.verdicts(name) if one.verdict != "not run"]
    if not decided:
        return
    yield f"(evidence-{name.lower()})=\n### {name}: {title}\n"
    yield f"{{ref}}`The claim, its evidence and its rule <claim-{name.lower()}>`.\n"
    for one in decided:
        yield f"{badge(one.verdict)} on {DATASETS[one.dataset]}\n"
        yield f"````{{dropdown}} {len(one.findings)} comparison{'s' * (len(one.findings) > 1)} on {DATASETS[one.dataset]}"
        yield from comparison_table(one.findings)
        yield "````\n"


# ---------------------------------------------------------------------------------------------- parameters


def parameters(notebook: Path, experiments: Mapping[str, Experiment]) -> Iterator[str]:
    """Every parameter: its meaning, its value on the page, and what the experiments of each dataset give it."""
    from papermill import inspect_notebook  # reads the tagged cell, comments included

    found = inspect_notebook(str(notebook))
    by_place = {place: [one for name, one in experiments.items() if name.split("/")[1] == place] for place in PLACES}
    places = [place for place, of in by_place.items() if of]
    yield "## All parameters\n"
    beside = f" Beside the value of the page stands that of the experiments on each dataset; {EACH}." if places else ""
    yield f"The one tagged cell of the notebook, as papermill reads it.{beside}\n"
    rows = []
    for name, one in found.items():
        cells = [in_place(name, by_place[place]) for place in places]
        rows.append([f"`{name}`", escape(one["help"]), f"`{one['default']}`", *cells])
    yield "````{div} wide-table\n"
    yield from table(["parameter", "meaning", "page", *(PLACES[place] for place in places)], rows)
    yield "````\n"


def in_place(name: str, experiments: Iterable[Experiment]) -> str:
    """The one value that all experiments give a parameter; a dash where they leave the page's."""
    given = {json.dumps(one.settings[name]) for one in experiments if name in one.settings}
    everywhere = all(name in one.settings for one in experiments)
    if not given:
        return "–"
    return f"`{given.pop()}`" if len(given) == 1 and everywhere else "*varies*"


# ---------------------------------------------------------------------------------------------- costs


def costs(root: Path, chapter: str) -> Iterator[str]:
    """What a run of the page takes, what the benchmarks measured of the chapter's work, what paper size needs."""
    yield "## Costs\n"
    record = root / f"book/data/executions/{chapter}.json"
    if record.is_file():
        found = json.loads(record.read_text(encoding="utf-8"))
        yield (
            f"The page ran in {found['seconds']:.0f} s on {found['cpu_count']} cores of {found['machine']} "
            f"({found['finished'][:10]}); {{doc}}`/book/execution` says where the time went.\n"
        )
    short = chapter.partition("_")[2]
    cases = json.loads((root / "benchmarks/results/bench.json").read_text(encoding="utf-8"))["cases"]
    words = BENCHMARKS.get(short, (short,))
    rows = [
        [case["what"], name, f"{one['ratio']:.2f}", "–" if one["target"] is None else f"{one['target']:g}"]
        for key, case in cases.items()
        if any(re.search(rf"(^|-){word}($|-)", key) for word in words)
        for name, one in case["ratios"].items()
    ]
    if rows:
        yield "Ratios from {doc}`/book/benchmarks`:\n"
        yield from table(["work", "ratio", "now", "target"], rows)
    needs = load_yaml(read_text(root / "book/data/requirements.yaml", "what `itm recipe --requirements` writes"))
    rows = [
        [f"`{title}`", one["runs"], f"{one['hours']:,}", f"{one['gigabytes']:,} GB", f"{one['gpu_gib']} GiB"]
        for title, one in needs["tables"].items()
        if title.startswith(f"{short}/")
    ]
    if rows:
        yield f"At paper size, **estimated** for one {needs['gpu']} ({{doc}}`/book/running-at-paper-scale`):\n"
        yield from table(["table", "runs", "hours", "disk", "GPU memory"], rows)

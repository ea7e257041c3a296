"""What is verified and what is not, in four groups, and every capability: from records, benchmarks and receipts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from itm_lab.evidence.ledger import OLD_PROTOCOL, VERDICTS, Ledger
from itm_lab.experiments.experiment_files import Experiment, read_experiments
from itm_lab.publish.benchmarks_page import machine, reached
from itm_lab.publish.chapters_table import chapters, verdicts
from itm_lab.publish.claims_page import DATASETS, SHOWN, papers_of
from itm_lab.publish.ledger_pages import open_ledger
from itm_lab.publish.markdown import badge, escape, joined, table
from itm_lab.publish.parity_record import read_record
from itm_lab.publish.trust_page import WORKS
from itm_lab.records.nested_yaml import load_yaml
from itm_lab.records.receipts import is_old_protocol
from itm_utils.files import read_text

CAPABILITIES = "book/data/capabilities.yaml"
RUN = "run:"  # before the name of an experiment, in a capability
# Models without public code: their reference cases are of a second implementation of the same reading of the paper.
SECOND_READING = ("mmca", "dcpa", "ccr_ccs", "attention_metrics")
BOTH = ("aoq", "aoq_variants")  # public code, and a second implementation besides
# What a test proves without leaving numbers behind: what, and where.
PROVED = {
    "the papers' equations, written as loops, with all gradients": "tests/unit",
    "every matcher: masks, blocks, given pairs, half precision, another device": "tests/contract/test_matchers.py",
    "recalls, ranks, folds, ties and NaN against a slow reference, with random inputs": "tests/unit/test_metrics.py",
    "a training that is killed again and again ends in the same weights, bit for bit (CPU)": "tests/integration/test_training.py",
    "`itm run`: every chapter's experiments end to end on small files in the format of Flickr30K and COCO": "tests/integration/test_paper_scale.py",
    "`itm data`: 2,000 made images of bottom-up TSV in bounded memory, killed and resumed to the same bytes": "tests/integration/test_data_tools.py",
    "`itm features` and `itm search` from a folder of photographs": "tests/integration/test_photos.py",
    "Scenes: every caption checked against its image and its near-twins": "tests/unit/test_scenes_world.py",
}  # fmt: skip
NAMES = {"f30k": "Flickr30K", "coco": "MS-COCO"}


def fragment(root: Path) -> Iterator[str]:
    """The page as MyST text, beginning with a heading."""
    ledger = open_ledger(root)
    yield from correct(root)
    yield from fast(root)
    yield from evidence(root, ledger)
    yield from not_run(root, ledger)
    yield from capabilities(root)


# ---------------------------------------------------------------------------------------------- correct


def correct(root: Path) -> Iterator[str]:
    """Parity of every model, faults that were survived, and what tests prove."""
    yield "## Correct\n"
    record = read_record(root)
    yield (
        f"Reference cases, recorded on {record['finished']} with torch {record['torch']}; "
        f"`itm parity tests/golden` compares them again, and so does every `make test`.\n"
    )
    rows = []
    for model in dict.fromkeys(row["case"].partition("/")[0] for row in record["rows"]):
        of = [row for row in record["rows"] if row["case"].partition("/")[0] == model]
        within = sum(row["difference"] <= row["allowed"] for row in of)
        kinds = joined(list(dict.fromkeys(row["kind"] for row in of)))
        rows.append([f"`{model}`", reference(model), len({row["case"] for row in of}), kinds, f"{within} of {len(of)}"])
    yield from table(["model", "compared with", "cases", "quantities", "within the bounds"], rows)
    counted = json.loads(read_text(root / "book/data/faults.json", "what `make faults` counted"))
    yield "What tests and campaigns prove besides:\n"
    rows = [[what, f"`{where}`"] for what, where in PROVED.items()]
    rows += [[f"{said}: {told}", "{doc}`/book/trust`"] for said, told in faults(counted)]
    yield from table(["what", "where"], rows)


def reference(model: str) -> str:
    """What a model's reference values come from."""
    if model in BOTH:
        return "public code and a second implementation"
    return "a second implementation of the same reading (no public code)" if model in SECOND_READING else "public code"


def faults(counted: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Works that were struck, and readers whose inputs were damaged, with their outcomes."""
    for part, field in (*dict.fromkeys(WORKS, "faults").items(), ("inputs", "inputs")):
        outcomes: Counter[str] = Counter()
        for row in counted[part][field]:
            outcomes.update({name: number for name, number in row.items() if isinstance(number, int)})
        told = ", ".join(f"{number} {word}" for word, number in outcomes.most_common())
        yield (
            (f"faults at random points of {part}" if field == "faults" else "damaged inputs of readers and commands"),
            told,
        )


# ---------------------------------------------------------------------------------------------- fast


def fast(root: Path) -> Iterator[str]:
    """How many ratios of each kind of work reach their targets."""
    bench = json.loads(read_text(root / "benchmarks/results/bench.json", "what `make bench` measured"))
    yield "## Fast\n"
    yield f"Ratios to straightforward versions and to bare matrix products ({machine(bench['machine'])}); each is on {{doc}}`/book/benchmarks`.\n"
    rows = []
    for group in dict.fromkeys(case["group"] for case in bench["cases"].values()):
        cases = [case for case in bench["cases"].values() if case["group"] == group]
        outcomes = [reached(one) for case in cases for one in case["ratios"].values()]
        aimed = [one for one in outcomes if one is not None]
        rows.append([group, len(outcomes), len(aimed), sum(aimed), len(aimed) - sum(aimed)])
    yield from table(["work", "ratios", "with a target", "reached", "missed, with a reason"], rows)


# ---------------------------------------------------------------------------------------------- evidence


def evidence(root: Path, ledger: Ledger) -> Iterator[str]:
    """Verdicts by paper, and receipts by chapter."""
    yield "## Evidence\n"
    yield "Claims by verdict, computed from receipts ({doc}`/book/claims`, {doc}`/book/claims-foundations`):\n"
    claims = ledger.claims | ledger.foundations
    rows = []
    for paper, names in papers_of(claims).items():
        words = Counter(ledger.verdict(name).verdict for name in names)
        rows.append([SHOWN.get(paper, paper), len(names), *(words[word] or "–" for word in VERDICTS)])
    yield from table(["paper", "claims", *map(badge, VERDICTS)], rows)
    yield f"Receipts; those of the {OLD_PROTOCOL} are shown in tables and decide nothing:\n"
    counted: dict[tuple[str, str], Counter[str]] = {}
    for (chapter, _, dataset), runs in ledger.receipts.items():
        of = counted.setdefault((chapter, dataset), Counter())
        for _, receipt in runs.values():
            of[OLD_PROTOCOL if is_old_protocol(receipt) else "counted"] += 1
    rows = [
        [f"{{doc}}`/notebooks/{chapter}`", DATASETS[dataset], of["counted"], of[OLD_PROTOCOL]]
        for (chapter, dataset), of in sorted(counted.items())
    ]
    yield from table(["chapter", "data", "can be checked", OLD_PROTOCOL], rows or [["no receipts yet", "–", 0, 0]])


# ---------------------------------------------------------------------------------------------- not run


def not_run(root: Path, ledger: Ledger) -> Iterator[str]:
    """Claims without a verdict, and experiments at paper size without a receipt."""
    yield "## Not run\n"
    rows = []
    for chapter in chapters(root):
        waiting = verdicts(ledger, chapter).get("not run", 0)
        by_place = {place: at_paper_size(root, ledger, chapter, place) for place in NAMES}
        if waiting or any(planned for planned, _ in by_place.values()):
            cells = [f"{planned - done} of {planned}" if planned else "–" for planned, done in by_place.values()]
            rows.append([f"{{doc}}`/notebooks/{chapter}`", waiting or "–", *cells])
    yield "Claims that wait for their runs, and experiments at the papers' size without a receipt: these need a GPU and the published features.\n"
    yield from table(["chapter", "claims not run", *(f"experiments on {name}" for name in NAMES.values())], rows)


def at_paper_size(root: Path, ledger: Ledger, chapter: str, place: str) -> tuple[int, int]:
    """How many experiments a chapter plans on a dataset, and how many have a receipt."""
    short = chapter.partition("_")[2]
    if not (root / f"experiments/{short}.yaml").is_file():
        return 0, 0
    planned: list[Experiment] = [
        one for name, one in read_experiments(root, short).items() if name.split("/")[1] == place
    ]
    known = {(variant, dataset) for of, variant, dataset in ledger.receipts if of == chapter}
    done = [one for one in planned if (one.values()["variant"], place) in known]
    return len(planned), len(done)


# ---------------------------------------------------------------------------------------------- capabilities


def capabilities(root: Path) -> Iterator[str]:
    """Every capability, done or partial with what is missing."""
    groups = read_capabilities(root)
    every = [entry for group in groups for entry in group["entries"]]
    partial = [entry for entry in every if entry["state"] == "partial"]
    yield "## Capabilities, entry by entry\n"
    yield (
        f"What a system described by the four papers must be able to do: {len(every)} entries, {len(every) - len(partial)} done, "
        f"{len(partial)} partial. D, A, C and M are DCPA, AOQ, CCR/CCS and MMCA. *Named* by a paper, *implied* by something named, "
        f"or needed for a *fair* test of a claim.\n"
    )
    for group in groups:
        done = sum(entry["state"] == "done" for entry in group["entries"])
        yield f"### {group['title']}\n"
        yield f"````{{dropdown}} {done} of {len(group['entries'])} done"
        yield from table(["", "capability", "source", "need", "state", "where"], map(capability_row, group["entries"]))
        yield "````\n"


def capability_row(entry: Mapping[str, Any]) -> list[str]:
    """One entry as cells."""
    state = entry["state"] if entry["state"] == "done" else f"**partial**: {escape(entry['missing'])}"
    where = ", ".join(f"`{name.removeprefix(RUN)}`" for name in entry["where"])
    return [entry["id"], escape(entry["what"]), escape(entry["source"]), entry["need"], state, where]


def read_capabilities(root: Path) -> list[dict[str, Any]]:
    """The groups of capabilities."""
    return load_yaml(read_text(root / CAPABILITIES, "the list of capabilities"))["groups"]

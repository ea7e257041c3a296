"""The ledger's pages as MyST text, made while the book is built, so that no page can disagree with its receipts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

from itm_lab.evidence.chance import with_chance
from itm_lab.evidence.ledger import OLD_PROTOCOL, Ledger
from itm_lab.evidence.statistics import Interval, seed_interval
from itm_lab.evidence.verdicts import row_name
from itm_lab.publish import claims_page
from itm_lab.publish.claims_page import DATASETS, chapter_of, figures, label
from itm_lab.publish.judgements_page import judgements_fragment
from itm_lab.publish.markdown import escape, joined, table
from itm_lab.publish.photographs_page import photographs_fragment
from itm_lab.publish.uncertainty_page import uncertainty_fragment
from itm_lab.records.receipts import is_old_protocol
from itm_lab.records.rules import RECALLS, listed
from itm_utils.errors import input_error

__all__ = ["OTHERS", "escape", "figures", "open_ledger", "page"]

# The models that chapters build, in the settings they recommend; variants that take something away are not among them.
MODELS = (
    "mean-pool",
    "VSE++ tuned on validation",
    "VSE++ bidirectional",
    *(f"SCAN {kind} {how}" for kind in ("t2i", "i2t", "ensemble") for how in ("AVG", "LSE")),
    *(f"BFAN {kind}" for kind in ("equal", "prob", "ensemble")),
    *(f"PFAN {kind}" for kind in ("t2i", "i2t", "ensemble")),
    "VSRN",
    "SAEM",
    *(f"SGRAF {kind}" for kind in ("SAF", "SGR", "ensemble")),
    "MMCA",
)
SEEDS = (5, 6, 7)  # that every one of them was trained with
COLUMNS = (*RECALLS, "rsum_computed", "att_precision", "att_recall", "att_f1", "seconds_per_batch")
OTHERS = ("claims", "foundations", "lab", "uncertainty", "photographs", "judgements")  # pages that are no paper's


def page(ledger: Ledger, name: str) -> str:
    """The text of one page, without headings or beginning with one (Sphinx would put what stands before to the end).

    name: one of ``OTHERS`` or a paper of published_tables.yaml."""
    if name == "claims":
        return "\n".join(claims_page.overview(ledger))
    if name == "foundations":
        about = {claim["paper"]: _about(ledger, claim) for claim in reversed(ledger.foundations.values())}
        return "\n".join(claims_page.foundations(ledger, about))
    if name == "lab":
        return "\n".join(lab_page(ledger))
    if name == "uncertainty":
        return uncertainty_fragment(ledger)
    if name == "judgements":
        return judgements_fragment(ledger.root)
    if name == "photographs":
        return photographs_fragment(ledger)
    if name in ledger.results:
        return "\n".join(results_page(ledger, name))
    raise input_error("ledger-page", name, ", ".join([*OTHERS, *ledger.results]))


@lru_cache(maxsize=1)
def open_ledger(root: Path) -> Ledger:
    """The ledger of a repository, read once for all pages of a build."""
    return Ledger(root)


# ---------------------------------------------------------------------------------------------- results


def results_page(ledger: Ledger, paper: str) -> Iterator[str]:
    """The claims of a paper with their verdicts, then every table of it with our column beside its rows."""
    content = ledger.results[paper]
    yield "## The paper\n"
    yield _about(ledger, {"paper": paper})
    yield from claims_page.paper_claims(ledger, paper)
    for name, body in content["tables"].items():
        yield f"## {heading(name)}: {escape(body['caption'])}\n"
        if "note" in body:
            yield f"{escape(with_full_stop(body['note']))}\n"
        for block in body["blocks"]:
            yield from block_table(ledger, paper, name, block)
    yield from text_table(ledger, paper)


def heading(name: str) -> str:
    """A table's name as the paper prints it: table_III → Table III."""
    kind, _, number = name.partition("_")
    return f"{kind.capitalize()} {number}"


def text_table(ledger: Ledger, paper: str) -> Iterator[str]:
    """Numbers that a paper prints in its text, with ours beside them; by rows.yaml."""
    lines = []
    for entry in ledger.read("rows").get("text", ()):
        if entry["paper"] != paper:
            continue
        printed = ledger.results[paper]["text_numbers"][entry["name"]]
        for key, dataset in entry["datasets"].items():
            found = ours(ledger, (entry["variant"], entry["metric"]), dataset)
            lines.append([escape(entry["about"]), DATASETS[dataset].removesuffix(" 1K"), f"{printed[key]:,}", found])
    if lines:
        yield "## Numbers of the text\n"
        yield from table(["what", "data", "printed", "ours"], lines)


def block_table(ledger: Ledger, paper: str, where: str, block: Mapping[str, Any]) -> Iterator[str]:
    """One part of a table: the printed numbers, ours on the same data, and ours on the data that we could run."""
    rows, place = block["rows"], dataset_of(block)
    variants = [variant_of(ledger, f"{paper} {where}", row) for row in rows]
    more = [
        name
        for name in ("flickr8k", "scenes")
        if any(variant and runs_of(ledger, variant[0], name) for variant in variants)
    ]
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    remarks: dict[str, int] = {}
    lines = []
    for row, variant in zip(rows, variants, strict=True):
        numbers = [remarks.setdefault(remark, len(remarks) + 1) for remark in remarks_on(ledger, block, row)]
        name = f"**{escape(row_name(row))}**" if row.get("ours") else escape(row_name(row))
        mark = f" ({', '.join(map(str, numbers))})" if numbers else ""
        printed = ["–" if (value := printed_value(row, name)) is None else value for name in columns]
        lines.append([name + mark, *printed, *(ours(ledger, variant, dataset) for dataset in (place, *more))])
    yield f"**{escape(block['dataset'])}**, {escape(block['protocol'])}.\n"
    heads = list(map(label, columns))
    yield from table(
        ["method", *heads, *(f"ours, {DATASETS[name].removeprefix('the ')}" for name in (place, *more))], lines
    )
    for remark, number in remarks.items():
        yield f"({number}) {escape(remark)}\n"


def dataset_of(block: Mapping[str, Any]) -> str:
    """The ledger's name of the data a block was measured on."""
    if block["dataset"].startswith("Flickr30K"):
        return "f30k"
    return "coco 5K" if block["protocol"] == "full 5K" else "coco"


def variant_of(ledger: Ledger, table: str, row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Our variant and metric for a row of a paper's table, by rows.yaml; None where the book does not run that row."""
    for entry in read_rows(ledger):
        fits = all(row.get(key) in listed(value) for key, value in entry["row"].items())
        if table in entry["tables"] and fits:
            return entry["variant"].format(**row), entry.get("metric", "rsum")
    return None


@lru_cache(maxsize=4)
def read_rows(ledger: Ledger) -> list[dict[str, Any]]:
    return ledger.read("rows")["rows"]


def runs_of(ledger: Ledger, variant: str, dataset: str) -> dict[int, dict[str, Any]]:
    """Seed → receipt of a variant on a dataset, with the chance level of its attention F1."""
    found = ledger.receipts.get((ledger.chapter_of(variant), variant, dataset), {})
    return {seed: with_chance(receipt) for seed, (_, receipt) in found.items()}


def ours(ledger: Ledger, variant: tuple[str, str] | None, dataset: str) -> str:
    """Our number beside a row: the mean over seeds with its interval, or that of the only run over images."""
    if variant is None:
        return "–"
    runs = [run for run in runs_of(ledger, variant[0], dataset).values() if variant[1] in run["metrics"]]
    if not runs:
        return "not run"
    metrics = [run["metrics"] for run in runs]
    chance = [one["att_f1_chance"]["value"] for one in metrics if "att_f1_chance" in one]
    beside = f"; every region {mean(chance):.1f}" if chance and variant[1].startswith("att_f1") else ""
    digits = 3 if variant[1] == "seconds_per_step" else 1  # as the paper prints them
    return over_seeds([one[variant[1]] for one in metrics], digits) + beside + age(runs)


def age(runs: list[dict[str, Any]]) -> str:
    """What stands behind the numbers of runs that are too old to be checked."""
    return f", {OLD_PROTOCOL}" if runs and is_old_protocol(runs[0]) else ""


def over_seeds(found: list[dict[str, float]], digits: int = 1) -> str:
    """Mean and interval of one metric of several runs, as text."""
    if len(found) > 1:
        interval = seed_interval([metric["value"] for metric in found])
    else:
        value = found[0]["value"]
        interval = Interval(value, found[0].get("low", value), found[0].get("high", value))
    value, low, high = (f"{number:.{digits}f}" for number in interval)
    return f"{value} \\[{low}, {high}\\] ({len(found)})"


def printed_value(row: Mapping[str, Any], column: str) -> float | str | None:
    """A printed number; our sum of the recalls in brackets where the paper prints none."""
    if column == "rsum_computed":
        return f"({row[column]})" if row.get("rsum") is None and row.get(column) is not None else row.get("rsum")
    return row.get(column)


def remarks_on(ledger: Ledger, block: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[str]:
    """What a reader should know before comparing with this row."""
    if row.get("ensemble_of_two"):
        yield "Two models, their scores averaged."
    elif others := same_numbers(ledger, block, row):
        yield f"The same numbers as a row that {others} marks as two models, their scores averaged."
    if row.get("external_knowledge"):
        yield "Uses external knowledge."
    if row.get("single_1k_split"):
        yield "One split of 1,000 images, not the mean over five."
    if "rsum_mismatch" in row:
        wrong = row["rsum_mismatch"]
        yield f"Printed rsum {wrong['printed']}; the six recalls add up to {wrong['sum_of_six']}."
    for name, doubt in row.get("ocr_suspect", {}).items():
        if doubt["basis"] != "lost decimal point":
            read = "none" if doubt["adopted"] is None else doubt["adopted"]
            yield f"{label(name)}: our text of the paper has {doubt['raw']}; read as {read}: {doubt['basis']}."
    if "note" in row:
        yield with_full_stop(row["note"])


def same_numbers(ledger: Ledger, block: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """The paper that marks the very same numbers of the same method as an ensemble, if one does."""
    mine = [row.get(name) for name in RECALLS]
    for paper, content in ledger.results.items():
        for body in content["tables"].values():
            for other in body["blocks"]:
                for known in other["rows"] if dataset_of(other) == dataset_of(block) else ():
                    same = known["method"] == row["method"] and [known.get(name) for name in RECALLS] == mine
                    if same and known.get("ensemble_of_two") and mine[0] is not None:
                        return paper
    return ""


# ---------------------------------------------------------------------------------------------- lab


def lab_page(ledger: Ledger) -> Iterator[str]:
    """All models on the seeds they share, then every variant with receipts, chapter by chapter and dataset by dataset."""
    yield from shared_seeds(ledger)
    groups = sorted({(chapter, dataset) for chapter, _, dataset in ledger.receipts})
    if not groups:
        yield "No receipts yet.\n"
    for chapter, dataset in groups:
        yield f"## Chapter {chapter[:2]}, {DATASETS[dataset]}\n"
        lines = []
        for (of, variant, place), found in ledger.receipts.items():
            if (of, place) == (chapter, dataset):
                runs = [receipt for _, receipt in found.values()]
                metrics = [[run["metrics"][name] for run in runs] for name in ("rsum", "i2t_r1", "t2i_r1")]
                models = {run["models"] for run in runs}
                cells = [escape(variant) + age(runs), joined(sorted(map(str, models))), *map(over_seeds, metrics)]
                lines.append((is_old_protocol(runs[0]), metrics, cells))
        lines.sort(key=lambda line: (line[0], -sum(metric["value"] for metric in line[1][0]) / len(line[1][0])))
        yield from table(["variant", "models", "rsum", "i2t R@1", "t2i R@1"], (line for _, _, line in lines))


def shared_seeds(ledger: Ledger) -> Iterator[str]:
    """The models of all chapters on Scenes, each on the same three seeds, best first; those of the old protocol apart."""
    rows: dict[bool, list[tuple[float, list[str]]]] = {}
    for (chapter, variant, dataset), found in ledger.receipts.items():
        if dataset == "scenes" and variant in MODELS and set(SEEDS) <= found.keys():
            runs = [found[seed][1] for seed in SEEDS]
            metrics = [[run["metrics"][name] for run in runs] for name in ("rsum", "i2t_r1", "t2i_r1")]
            cells = [escape(variant), chapter[:2], str(runs[0]["models"]), *map(over_seeds, metrics)]
            place = rows.setdefault(is_old_protocol(runs[0]), [])
            place.append((sum(run["metrics"]["rsum"]["value"] for run in runs), cells))
    for old, of in sorted(rows.items()):  # two protocols are two tables
        which = f", {OLD_PROTOCOL}" * old
        yield f"## All models so far, on seeds {SEEDS[0]} to {SEEDS[-1]} of Scenes{which}\n"
        of.sort(key=lambda row: -row[0])
        yield from table(["model", "chapter", "models", "rsum", "i2t R@1", "t2i R@1"], (cells for _, cells in of))


# ---------------------------------------------------------------------------------------------- words


def with_full_stop(note: str) -> str:
    """A note with a capital letter and a full stop."""
    return f"{note[0].upper()}{note[1:]}{'' if note.endswith('.') else '.'}"


def _about(ledger: Ledger, claim: Mapping[str, Any]) -> str:
    """Who wrote the paper of a claim, with links to its chapter and to what stands behind the verdicts."""
    chapter = chapter_of(claim)
    stem = chapter.split("_")[1]
    key = re.search(rf"@\w+{{(\w+\d{{4}}{stem}),", (ledger.root / "book/references.bib").read_text(encoding="utf-8"))
    cited = f"{{cite:t}}`{key[1]}`. " if key else ""
    return f"{cited}Chapter: {{doc}}`/notebooks/{chapter}`, companion: {{doc}}`/book/companions/{chapter}`.\n"

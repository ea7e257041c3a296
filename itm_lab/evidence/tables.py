"""What chapters print beside their own runs: lab receipts, searches on dev, rows of published tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from itm_lab.evidence.chance import chance_beside
from itm_lab.evidence.statistics import Interval, seed_interval
from itm_lab.paths import Paths
from itm_lab.records.collapse import NUMBERS
from itm_lab.records.nested_yaml import load_yaml
from itm_lab.records.receipts import is_old_protocol, read_named_receipt, variant_receipts


def lab_table(
    variants: Mapping[str, str], seeds: Iterable[int] = range(5, 8), metric: str = "rsum", dataset: str = "scenes"
) -> dict[str, Interval]:
    """Print one line a variant: its mean over these seeds with Student's interval; return what was printed.

    One seed has no interval: its value stands alone, and both ends of what is returned are the value.

    variants: variant → chapter that trains it. A variant without receipts of all these seeds is printed as not run, and is left
    out of what is returned. Where one variant has receipts of today's protocol, the others that have only old ones say so and
    are left out too: two protocols are never compared.
    """
    wanted, rows = set(seeds), {}
    room = max(map(len, variants))
    every = {name: of_one_protocol(variant_receipts(chapter, name, dataset)) for name, chapter in variants.items()}
    mixed = len({is_old_protocol(known[0]) for known in every.values() if known}) > 1
    for variant, known in every.items():
        if mixed and known and is_old_protocol(known[0]):
            print(f"{variant:{room}}  old protocol, not compared")
            continue
        found = [receipt for receipt in known if receipt["seed"] in wanted]
        if len(found) < len(wanted):
            print(f"{variant:{room}}  not run yet ({len(found)} of {len(wanted)} seeds)")
            continue
        values = [receipt["metrics"][metric]["value"] for receipt in found]
        row = rows[variant] = seed_interval(values) if len(values) > 1 else Interval(*3 * values)
        spread = f"[{row.low:.1f}, {row.high:.1f}]" if len(values) > 1 else "(one seed)"
        models = "two models" if found[0]["models"] == 2 else "one model"
        shown = f"{row.value:5.1f}  {spread}  {models}"
        print(f"{variant:{room}}  {metric} {shown}{chance_beside(metric, found)}")
    return rows


def of_one_protocol(receipts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The receipts of today's protocol, where there are any; else the old ones."""
    return [receipt for receipt in receipts if not is_old_protocol(receipt)] or receipts


def planned_runs(chapter: str, variant: str, seeds: Iterable[int], dataset: str = "scenes") -> list[dict[str, Any]]:
    """The receipts of a variant with these seeds that today's protocol wrote, in the order of their seeds."""
    found = {one["seed"]: one for one in variant_receipts(chapter, variant, dataset) if not is_old_protocol(one)}
    return [found[seed] for seed in seeds if seed in found]


def current_values(chapter: str, variant: str, metric: str = "rsum", dataset: str = "scenes") -> dict[int, float]:
    """Seed → one metric of a variant, from its receipts of today's protocol."""
    known = [one for one in variant_receipts(chapter, variant, dataset) if not is_old_protocol(one)]
    return {one["seed"]: one["metrics"][metric]["value"] for one in known}


def differences_from(
    chosen: float, variants: Mapping[float, str], chapter: str, dataset: str = "scenes"
) -> dict[float, Interval]:
    """Setting → interval of the differences in rsum from the chosen setting, over the seeds that both have run.

    variants: setting → variant. Settings with fewer than two common seeds are left out; receipts are those of today's protocol.
    """
    values = {setting: current_values(chapter, name, dataset=dataset) for setting, name in variants.items()}
    base, found = values[chosen], {}
    for setting, by_seed in values.items():
        common = sorted(base.keys() & by_seed.keys())
        if len(common) > 1:
            found[setting] = seed_interval([by_seed[seed] - base[seed] for seed in common])
    return found


@dataclass(frozen=True)
class LearningCurves:
    """R@1 on dev after each epoch, mean over seeds. warmup: epochs of it. old: whether the runs are of the old protocol."""

    i2t: list[float]
    t2i: list[float]
    warmup: int
    old: bool


def learning_curves(
    chapter: str, variants: Iterable[str], seeds: Iterable[int], dataset: str = "scenes"
) -> dict[str, LearningCurves]:
    """Variant → curves of its receipts of these seeds; without variants that have none.

    Where one variant has receipts of today's protocol, those that have only old ones are left out.
    """
    wanted, found = set(seeds), {}
    for variant in variants:
        known = of_one_protocol(variant_receipts(chapter, variant, dataset))
        runs = [run for run in known if run["seed"] in wanted]
        i2t, t2i = (mean_curve(runs, f"dev_{way}_r1_epoch_") for way in ("i2t", "t2i"))
        if i2t and t2i:
            warmup = max(run["parameters"]["warmup_epochs"] for run in runs)
            found[variant] = LearningCurves(i2t, t2i, warmup, is_old_protocol(runs[0]))
    newest = min((one.old for one in found.values()), default=True)
    return {variant: one for variant, one in found.items() if one.old == newest}


def mean_curve(runs: Iterable[Mapping[str, Any]], start: str) -> list[float]:
    """Means over runs of the metrics that begin so, in the order of their names; empty without any."""
    rows = [[one["value"] for name, one in sorted(run["metrics"].items()) if name.startswith(start)] for run in runs]
    return [sum(values) / len(values) for values in zip(*rows, strict=True)]


def collapse_means(receipts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What it is → mean over receipts of each number in which a collapse shows; empty for receipts without them.

    Receipts written before these numbers were recorded have none; they take no part in a mean.
    """
    listed = [receipt["metrics"] for receipt in receipts]
    found = {what: [one[name]["value"] for one in listed if name in one] for name, what in NUMBERS.items()}
    return {what: sum(values) / len(values) for what, values in found.items() if values}


def collapse_table(variants: Mapping[str, str], dataset: str = "scenes") -> dict[str, dict[str, float]]:
    """Print one line a variant with receipts: the numbers in which a collapse shows; return those that have them.

    variants: variant → chapter that trains it.
    """
    rows, room = {}, max(map(len, variants), default=0)
    for variant, chapter in variants.items():
        if receipts := variant_receipts(chapter, variant, dataset):
            found = collapse_means(receipts)
            told = "; ".join(f"{what} {value:.3g}" for what, value in found.items())
            print(f"{variant:{room}}  {told or 'not recorded by these runs'}")
            rows |= {variant: found} if found else {}
    return rows


def search_table(
    chapter: str, variants: Iterable[str], parameter: str = "learning_rate", dataset: str = "scenes"
) -> None:
    """Print what a search on dev found: for each variant the tried values of one parameter and the mean rsum of each."""
    folder = Paths.find().receipts
    found = sorted((folder / chapter / "search").glob(f"*_{dataset}_s*.json"))
    receipts = [read_named_receipt(path, folder) for path in found]
    room = max(map(len, variants))
    for variant in variants:
        tried = {}
        for receipt in receipts:
            value = receipt["parameters"][parameter]
            if receipt["variant"] in (variant, f"{variant} {parameter}={value}"):
                tried.setdefault(value, []).append(receipt["metrics"]["rsum"]["value"])
        told = [f"{v:g}: {sum(x) / len(x):.1f}" + f" ({len(x)} seeds)" * (len(x) > 1) for v, x in sorted(tried.items())]
        print(f"{variant:{room}} ", "  ".join(told) or "none")


@dataclass(frozen=True)
class Published:
    """A row of a published table. place: paper and table. photos: dataset and size of the test. row: all it prints."""

    place: str
    photos: str
    row: dict[str, Any]

    @property
    def rsum(self) -> float | None:
        return self.row.get("rsum_computed")

    @property
    def recalls(self) -> list[float | None]:
        """R@1, R@5, R@10 from image to text, then from text to image; None where nothing is printed."""
        return [self.row.get(f"{way}_r{k}") for way in ("i2t", "t2i") for k in (1, 5, 10)]


def published_rows(method: str, plain: bool = True) -> Iterator[Published]:
    """Rows of a method in the tables of the four papers; none where the book's data is not at hand.

    plain: only the method itself, without the losses and constraints that a paper adds to it and without its variants.
    """
    paths = Paths.find_or_none()
    if paths is None or not paths.published_tables.is_file():
        return
    for paper, content in load_yaml(paths.published_tables.read_text(encoding="utf-8"))["papers"].items():
        for table, body in content["tables"].items():
            for block in body.get("blocks", ()):
                size = "5K" if "5K" in block["protocol"] else "1K"
                for row in block.get("rows", ()):
                    if row["method"] == method and not (plain and _is_changed(row)):
                        name = f"{paper} {table}".replace("_", " ").replace("CCR CCS", "CCR/CCS")
                        yield Published(name, f"{block['dataset']} {size}", row)


def published_text(paper: str, name: str) -> dict[str, Any]:
    """Numbers that a paper prints in its text, by their name in published_tables.yaml; empty where that is not at hand."""
    paths = Paths.find_or_none()
    if paths is None or not paths.published_tables.is_file():
        return {}
    papers = load_yaml(paths.published_tables.read_text(encoding="utf-8"))["papers"]
    return papers[paper]["text_numbers"][name]


def _is_changed(row: Mapping[str, Any]) -> bool:
    added = (row.get("training", "online triplet"), row.get("constraints", "none"))
    return "variant" in row or added != ("online triplet", "none")

"""The page that says what every table of the papers needs: its file fits the experiments, and it prints all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from itm_lab.experiments.cost import GPUS, USED, Costs
from itm_lab.publish.requirements_page import (
    FILE,
    GPU,
    bare_checkout,
    described,
    fragment,
    paper_tables,
    requirements,
    runs_of,
)
from itm_lab.records.nested_yaml import load_yaml

ROOT = Path(__file__).resolve().parents[2]
KNOWN = load_yaml((ROOT / FILE).read_text(encoding="utf-8"))
COUNTED = ("hours", "gigabytes", "gpu_gib")


def test_the_file_has_the_tables_recipes_and_needs_of_today() -> None:
    """Run `itm recipe --requirements` where this fails."""
    without = {
        kind: {name: {k: v for k, v in one.items() if k not in COUNTED} for name, one in KNOWN[kind].items()}
        for kind in ("tables", "recipes")
    }
    today = requirements(ROOT)
    assert without == {kind: today[kind] for kind in without}
    assert (KNOWN["gpu"], KNOWN["peak_tera_operations"], KNOWN["share_of_peak"]) == (GPU, GPUS[GPU][0], USED)
    assert all(one.keys() >= set(COUNTED) for kind in without for one in KNOWN[kind].values())


@pytest.mark.parametrize("name", ["scan/f30k/t2i_avg", "dcpa/f30k/two_stages", "vsepp/coco/vsepp"])
def test_the_numbers_are_those_of_a_plan(name: str) -> None:
    with bare_checkout(ROOT) as bare:
        counted = described(runs_of(bare, [name], ""), Costs(GPU))
    assert {key: KNOWN["recipes"][name][key] for key in COUNTED} == {key: counted[key] for key in COUNTED}


def test_every_paper_has_a_section_and_every_table_a_line() -> None:
    lines = list(fragment(ROOT))
    assert (
        "estimates" in lines[0]
        and f"{USED:.0%}" in lines[0]
        and GPU in lines[0]
        and "nothing on this page is measured" in lines[0]
    )
    for title in paper_tables(ROOT):
        assert f"## {title.partition('/')[0]}\n" in lines
        assert any(line.startswith(f"| `{title}` |") for line in lines)


def test_what_is_known_to_be_needed_is_named() -> None:
    tables = KNOWN["tables"]
    assert tables["scan/table_1"]["needs"] == ["data/f30k_precomp"]
    assert "text encoder bert-base-uncased" in tables["dcpa/table_I"]["needs"]
    assert "data/flickr30k_entities" in tables["ccr_ccs/table_3"]["needs"]
    assert "data/f30k_precomp/train_boxes.npy" in tables["pfan/flickr30k"]["needs"]
    alone = KNOWN["recipes"]["aoq/f30k/vsrn_adapoffquin"]["needs"]
    assert "online run runs/aoq/f30k/vsrn_online_short/s0" in alone  # in its table that run comes first
    assert not [need for need in tables["aoq/table_2"]["needs"] if need.startswith("online run")]

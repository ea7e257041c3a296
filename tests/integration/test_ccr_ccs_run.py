"""CCR and CCS at paper scale: photographs with the phrases of Flickr30K Entities."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_runs import itm
from toy_dataset import write_entities, write_toy_dataset

from itm_lab.records.receipts import read_receipt

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_paper_scale_run_asks_for_names_and_boxes_before_it_trains(tmp_path: Path) -> None:
    data = write_toy_dataset(tmp_path / "f30k", {"train": 40, "dev": 10, "test": 20}, regions=36, width=32)
    photos, names = [f"photo_{number}" for number in range(20)], tmp_path / "entities" / "names.txt"
    write_entities(names.parent, data, photos)
    names.write_text("".join(f"{photo}.jpg\n" for photo in photos), encoding="utf-8")
    small = {"width": 16, "word_dim": 8, "batch_size": 8, "device": "cpu", "num_workers": 0, "epochs": 1}
    small |= {"dataset": data, "run_dir": tmp_path / "run", "entities": names.parent, "variant": "SCAN baseline"}

    def run(**more) -> str:
        options = [word for name, value in (small | more).items() for word in ("-p", f"{name}={value}")]
        return itm(ROOT, "run", "ccr_ccs/f30k/scan_baseline", *options, "--receipts", str(tmp_path / "receipts")).output

    assert "test_00000.txt: found no such file" in run()  # the ids of the split are not the names of Entities
    (data / "test_boxes.npy").rename(tmp_path / "boxes.npy")
    assert "test_boxes.npy: found no such file" in run(image_names=names)
    assert not list(tmp_path.rglob("log.jsonl"))  # nothing was trained
    (tmp_path / "boxes.npy").rename(data / "test_boxes.npy")
    said = run(image_names=names)
    receipts = [read_receipt(path) for path in (tmp_path / "receipts").rglob("*.json")]
    assert len(receipts) == 1, said
    metrics = {name: entry["value"] for name, entry in receipts[0]["metrics"].items()}
    for name in ("precision", "recall"):  # of the baseline: its own best threshold is the common one
        assert metrics[f"att_{name}_common"] == metrics[f"att_{name}"]
    assert metrics["att_f1_iou_04"] == metrics["att_f1"] >= metrics["att_f1_to_one_tenth"] > 0
    assert {"att_f1_iou_03", "att_f1_iou_05", "att_f1_iou_06", "att_pr_area", "att_f1_mean_words"} <= set(metrics)

"""What `itm run` needs: each thing found, missed, and named with the command that makes it; files are made and small."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_dataset import write_entities, write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.experiments import needs as needing
from itm_lab.experiments.cost import Costs
from itm_lab.experiments.needs import Need, needs_of, require, text_encoder_need
from itm_lab.experiments.plan import plan
from itm_lab.experiments.runner import Job, expected_receipt
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import make_receipt, write_receipt
from itm_utils.errors import ItmError

ROOT = Path(__file__).resolve().parents[2]
NAMES = [f"photo_{number}" for number in range(6)]
SMALL = ["batch_size=8", "device=cpu"]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A checkout with a small Flickr30K, and nothing else that runs read."""
    for name in ("notebooks", "pyproject.toml", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    data = write_toy_dataset(tmp_path / "data/f30k_precomp", {"train": 12, "dev": 4, "test": 6}, regions=4, width=8)
    (data / "test_ids.txt").write_text("".join(f"{name}.jpg\n" for name in NAMES), encoding="utf-8")
    return tmp_path


def jobs_of(book: Path, *names: str, change: tuple[str, ...] = ()) -> list[Job]:
    return plan(book, list(names), "", "0", [*SMALL, *change], [])


def found_in(book: Path, *names: str, change: tuple[str, ...] = ()) -> dict[str, Need]:
    return {need.what: need for need in needs_of(jobs_of(book, *names, change=change), book / "receipts")}


def test_a_run_with_all_it_needs(book: Path) -> None:
    found = found_in(book, "scan/f30k/t2i_avg")
    assert [need.state for need in found.values()] == ["ok"] * 3
    assert found["data/f30k_precomp"].found.startswith("12 images in train, 4 in dev, 6 in test")
    assert found["batches of 8"].found == "60 captions to train on"
    require(jobs_of(book, "scan/f30k/t2i_avg"), book / "receipts")


@pytest.mark.parametrize(
    ("gone", "what", "found", "get"),
    [
        ("", "data/f30k_precomp", "no such folder", "itm data fetch f30k --data-root data"),
        ("train_ims.npy", "data/f30k_precomp/train_ims.npy", "no such file", "itm data fetch f30k"),
        ("test_caps.txt", "data/f30k_precomp/test_caps.txt", "no such file", "itm data fetch f30k"),
        ("toy_vocab.json", "data/f30k_precomp/*_vocab.json", "no vocabulary", "itm data vocabulary data/f30k_precomp"),
    ],
)
def test_data_that_is_not_there(gone: str, what: str, found: str, get: str, book: Path) -> None:
    place = book / "data/f30k_precomp" / gone
    place.unlink() if gone else shutil.rmtree(place)
    need = found_in(book, "scan/f30k/t2i_avg")[what]
    assert (need.state, need.found) == ("missing", found) and get in need.get
    with pytest.raises(ItmError, match=f"{found}.*{get}"):
        require(jobs_of(book, "scan/f30k/t2i_avg"), book / "receipts")


def test_data_that_does_not_fit_together(book: Path) -> None:
    path = book / "data/f30k_precomp/test_ims.npy"
    np.save(path, np.load(path)[..., :4])
    need = found_in(book, "scan/f30k/t2i_avg")[str(path)]
    assert need.state == "damaged" and need.found.startswith("images of shape (4, 4), expected (4, 8), as in train")


def test_a_text_encoder(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what, cached = "text encoder bert-base-uncased", []
    monkeypatch.setattr(needing, "is_cached", lambda name: name in cached)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert found_in(book, "mmca/f30k/full")[what].state == "missing"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert found_in(book, "mmca/f30k/full")[what].state == "note"  # the run fetches it
    assert "hf download bert-base-uncased" in found_in(book, "mmca/f30k/full")[what].get
    cached.append("bert-base-uncased")
    assert found_in(book, "mmca/f30k/full")[what].state == "ok"
    assert what not in found_in(book, "dcpa/f30k/gru")
    assert text_encoder_need("scenes-mini", book).state == "ok"
    assert text_encoder_need("data/minilm", book).found == "no such folder"


def test_a_text_encoder_in_a_folder(book: Path) -> None:
    folder = book / "bert-base-uncased"
    folder.mkdir()
    for name in ("config.json", "vocab.txt", "pytorch_model.bin"):
        (folder / name).touch()
    need = text_encoder_need("bert-base-uncased", book)
    assert need.state == "missing" and "weights as pickle are not loaded" in need.found
    (folder / "model.safetensors").touch()
    assert text_encoder_need("bert-base-uncased", book).state == "ok"


def finish(job: Job, results: Path) -> None:
    """What a finished run leaves: its receipt, here and in its folder."""
    about = {"chapter": job.experiment.chapter, "variant": job.parameters["variant"], "seed": job.seed}
    recalls = {f"{way}_r{k}": 50.0 for way in ("i2t", "t2i") for k in (1, 5, 10)} | {"rsum": 300.0}
    receipt = make_receipt(
        **about, dataset=job.facts.identity, parameters=settings_of(job.parameters), seconds=1.0, device="cpu",
        metrics=recalls,
    )  # fmt: skip
    for folder in (job.folder, results):
        write_receipt(receipt, folder)


LISTS = ("captions_mined=50", "captions_kept=20", "first_batch_size=8")


def test_the_online_run_and_the_lists_of_aoq(book: Path) -> None:
    name, before = "aoq/f30k/vsrn_adapoffquin", "aoq/f30k/vsrn_online_short"
    what, lists = "online run runs/aoq/f30k/vsrn_online_short/s0", "offline negatives runs/aoq/f30k/round_one/s0/lists"
    alone = found_in(book, name, change=(*LISTS, "variant=VSRN AdapOffQuin"))
    assert alone[what].state == "missing" and alone[what].get == f"`itm run {before} --seeds 0`"
    assert alone[lists].state == "planned" and "itm mine" in alone[lists].get
    both = plan(book, [name, before], "", "0", [*SMALL, *LISTS], [])
    folder = Path(both[0].parameters["run_dir"])
    found = {need.what: need for need in needs_of(both, book / "receipts")}
    assert found[f"online run {folder}"].state == "planned"
    (book / folder / "final").mkdir(parents=True)
    (book / folder / "final/log.jsonl").touch()  # a run that was begun
    (second,) = jobs_of(book, name, change=(*LISTS, f"online_run={folder}"))
    (need,) = (one for one in needs_of([second], book / "receipts") if one.what.startswith("online run"))
    assert need.state == "missing" and "not ended" in need.found
    finish(both[0], book / "receipts")
    (need,) = (one for one in needs_of([second], book / "receipts") if one.what.startswith("online run"))
    assert need.state == "ok"
    mined = Path(second.parameters["round_one"].format(seed=0)) / "lists"
    (book / mined).mkdir(parents=True)
    (book / mined / "manifest.json").touch()
    assert {n.what: n for n in needs_of([second], book / "receipts")}[f"offline negatives {mined}"].state == "ok"


@pytest.mark.parametrize(("mined", "kept", "state"), [(55, 55, "ok"), (56, 20, "missing"), (20, 30, "missing")])
def test_lists_longer_than_there_are_negatives(mined: int, kept: int, state: str, book: Path) -> None:
    change = (f"captions_mined={mined}", f"captions_kept={kept}", "first_batch_size=8")
    found = found_in(book, "aoq/f30k/scan_offtri".replace("offtri", "adapoffquin"), change=change)
    need = found[f"lists of {mined} offline negatives, {kept} of them kept"]
    assert need.state == state and need.found == "55 negatives for an image"


def test_the_baseline_of_ccr_and_ccs(book: Path) -> None:
    given = ("ccr_weight=0.1", "entities=")
    what = "baseline run runs/ccr_ccs/f30k/scan_baseline/s0"
    missing = found_in(book, "ccr_ccs/f30k/scan_ccr", change=given)[what]
    assert missing.state == "missing" and missing.get == "`itm run ccr_ccs/f30k/scan_baseline --seeds 0`"
    folder = book / "runs/ccr_ccs/f30k/scan_baseline/s0"
    folder.mkdir(parents=True)
    (folder / "attention.npz").touch()
    (folder / "11_ccr_ccs").mkdir()
    (folder / "11_ccr_ccs/one.json").touch()
    assert found_in(book, "ccr_ccs/f30k/scan_ccr", change=given)[what].state == "ok"
    assert not any(what in one for one in found_in(book, "ccr_ccs/f30k/scan_ccr", change=(*given, "evaluate_on=dev")))


def test_a_finished_run_needs_nothing_and_its_folder_may_be_needed_by_another(book: Path) -> None:
    change = ("entities=", "ccr_weight=0.1", "variant=one")
    (base,) = jobs_of(book, "ccr_ccs/f30k/scan_baseline", change=("entities=",))
    finish(base, book / "receipts")
    shutil.rmtree(base.folder)  # as in a checkout that has the receipt, and not the run
    assert list(found_in(book, "ccr_ccs/f30k/scan_baseline", change=("entities=",))) == ["data/f30k_precomp"]
    both = [base, *jobs_of(book, "ccr_ccs/f30k/scan_ccr", change=(*change, f"baseline={base.parameters['run_dir']}"))]
    (need,) = (one for one in needs_of(both, book / "receipts") if one.what.startswith("baseline run"))
    assert need.state == "missing" and "move the receipt away" in need.get
    expected_receipt(base, book / "receipts").unlink()
    (need,) = (one for one in needs_of(both, book / "receipts") if one.what.startswith("baseline run"))
    assert need.state == "planned"


def test_stage_one_of_dcpa(book: Path) -> None:
    what = "stage one runs/dcpa/f30k/intra/s0/intra"
    change = ("inter_batch_size=8", "variant=DCPA")
    need = found_in(book, "dcpa/f30k/two_stages", change=change)[what]
    assert need.state == "planned" and need.get == "`itm run dcpa/f30k/intra --seeds 0`"
    folder = book / "runs/dcpa/f30k/intra/s0/intra"
    folder.mkdir(parents=True)
    (folder / "best.safetensors").touch()
    assert found_in(book, "dcpa/f30k/two_stages", change=change)[what].state == "ok"


def test_entities_and_the_names_of_images(book: Path) -> None:
    name, entities = "ccr_ccs/f30k/scan_baseline", "data/flickr30k_entities"
    need = found_in(book, name)[entities]
    assert need.state == "missing" and "flickr30k_entities" in need.get and "no folder Annotations" in need.found
    data = book / "data/f30k_precomp"
    write_entities(book / entities, data, NAMES)
    assert found_in(book, name)[entities].state == "ok"
    (book / entities / "Annotations/photo_3.xml").unlink()
    need = found_in(book, name)[f"{entities}/Annotations/photo_3.xml"]
    assert need.state == "missing" and "1 of 6 images" in need.found and "itm data ids" in need.get
    (data / "test_ids.txt").unlink()
    (data / "ids").write_text("photo_1\n", encoding="utf-8")
    needing.open_data.cache_clear()
    need = found_in(book, name)["data/f30k_precomp/test_ids.txt"]
    assert need.state == "missing" and "itm data ids data/f30k_precomp test --karpathy FILE" in need.get
    need = found_in(book, name, change=("image_names=data/f30k_precomp/ids",))["data/f30k_precomp/ids"]
    assert need.state == "damaged" and need.found.startswith("1 names, expected the file names of 6 images")
    assert entities not in found_in(book, name, change=("evaluate_on=dev",))  # judged by rsum alone


@pytest.mark.parametrize(
    ("name", "splits"), [("pfan/f30k/t2i", ("train", "dev", "test")), ("ccr_ccs/f30k/scan_baseline", ("test",))]
)
def test_boxes_and_sizes(name: str, splits: tuple[str, ...], book: Path) -> None:
    data = book / "data/f30k_precomp"
    files = {f"data/f30k_precomp/{split}_boxes.npy" for split in splits}
    assert {what for what in found_in(book, name) if what.endswith("_boxes.npy")} == files
    (data / "test_sizes.npy").unlink()
    needing.open_data.cache_clear()
    states = {what: need.state for what, need in found_in(book, name).items() if what.endswith("_sizes.npy")}
    sizes = "data/f30k_precomp/test_sizes.npy"
    assert states.get(sizes) == ("missing" if name.startswith("pfan") else None)  # pixels need none, but for positions
    (data / "test_boxes.npy").unlink()
    needing.open_data.cache_clear()
    need = found_in(book, name)["data/f30k_precomp/test_boxes.npy"]
    assert need.state == "missing" and "itm data convert-tsv" in need.get and "--split test" in need.get
    assert not [
        what for what in found_in(book, "pfan/f30k/t2i", change=("position=none",)) if what.endswith("boxes.npy")
    ]


def test_a_batch_larger_than_the_training_set(book: Path) -> None:
    need = found_in(book, "scan/f30k/t2i_avg", change=("batch_size=61",))["batches of 61"]
    assert (need.state, need.found) == ("missing", "60 captions to train on") and "-p batch_size=60" in need.get
    # stage two is not trained, so its batches of 84 do no harm
    assert found_in(book, "dcpa/f30k/intra")["batches of 8"].state == "ok"
    assert found_in(book, "dcpa/f30k/two_stages")["batches of 8 and 84"].state == "missing"


def test_free_disk(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of(book, "scan/f30k/t2i_avg")
    space = needing.space_of(jobs)
    path, total = max(space, key=space.__getitem__), round(sum(space.values()))

    def state(free: int) -> str:
        usage = namedtuple("Usage", "total used free")(10**12, 0, free)
        monkeypatch.setattr("itm_lab.data.disk.shutil.disk_usage", lambda _: usage)
        (need,) = (one for one in needs_of(jobs, book / "receipts") if one.what.startswith("disk"))
        assert "to be written" in need.found
        return need.state

    assert (state(total), state(total - 1000)) == ("ok", "missing")
    path.mkdir(parents=True)
    (path / "step-00000001.safetensors").write_bytes(b"0" * 1000)  # what lies there is not written again
    assert state(total - 1000) == "ok"


def test_the_memory_of_a_gpu_is_a_note(book: Path) -> None:
    (job,) = plan(book, ["scan/f30k/t2i_avg"], "", "0", ["batch_size=8"], [])
    (need,) = (one for one in needs_of([job], book / "receipts", Costs("V100")) if one.what == "GPU memory")
    assert not need.unmet and "GiB held at most" in need.found
    assert torch.cuda.is_available() or "V100" in need.found


def test_scenes_are_built_by_the_first_run(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITM_CACHE", str(book / "cache"))
    assert needing.is_built(jobs_of(book, "scan/f30k/t2i_avg")[0])
    found = {need.what: need for need in needs_of(plan(book, ["scan/scenes/t2i_avg"], "", "5", [], []), book)}
    assert found["Scenes"].state == "planned" and found["Scenes"].get == "`itm scenes build`"
    assert not (book / "cache").exists()  # a plan builds nothing


def test_a_plan_says_what_is_missing_and_exits_with_one(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(book)
    small = [word for change in SMALL for word in ("-p", change)]
    whole = CliRunner().invoke(app, ["run", "scan/f30k/t2i_avg", "--dry-run", *small])
    assert whole.exit_code == 0 and "1 runs planned, none started" in whole.output
    shutil.rmtree(book / "data")
    for name, things in (("scan/f30k/t2i_avg", 1), ("ccr_ccs/f30k/scan_baseline", 4)):
        short = CliRunner().invoke(app, ["run", name, "--dry-run", *small])
        assert short.exit_code == 1 and "1 runs planned, none started" in short.output
        assert sum("  missing  " in line for line in short.output.splitlines()) == things
        stopped = CliRunner().invoke(app, ["run", name, *small])
        assert stopped.exit_code == 2 and len(stopped.output.strip().splitlines()) == 1
        assert "itm data fetch f30k" in stopped.output
        assert f"found {things} things missing" in stopped.output or things == 1
    assert not (book / "runs").exists() and not (book / "receipts").exists()

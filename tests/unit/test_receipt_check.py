"""Receipts that were forged, copied or relabelled: none of them reaches a verdict."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.evidence.ledger import Ledger
from itm_lab.evidence.rank_check import check_circumstances
from itm_lab.evidence.receipt_check import check_folder, check_one
from itm_lab.evidence.tables import search_table
from itm_lab.experiments.experiment_files import read_experiments
from itm_lab.records.bootstrap import bootstrap_intervals
from itm_lab.records.checkout import Code, git
from itm_lab.records.nested_yaml import load_yaml
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import Evidence, make_receipt, seal_of, variant_receipts, write_receipt
from itm_utils.errors import ItmError
from itm_utils.metrics.retrieval import Ranks

ROOT = Path(__file__).resolve().parents[2]
BOOK = Ledger(ROOT)
EXPERIMENTS = list(read_experiments(ROOT, "vsepp").values())
WARM, COLD = "VSE++ hardest after warm-up", "VSE++ hardest from step one"
SETTINGS, COLD_SETTINGS = (
    next(one for one in EXPERIMENTS if name == one.settings["variant"]).values() for name in (WARM, COLD)
)
CODE = Code(git(ROOT, "rev-parse", "HEAD"), True)


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Receipts of three seeds of one variant, made once: their intervals are drawn a thousand times."""
    folder = tmp_path_factory.mktemp("three_seeds")
    for seed in (5, 6, 7):
        put(folder, seed, 300 + seed)
    return folder


@pytest.fixture
def root(tmp_path: Path, three_seeds: Path) -> Path:
    """A checkout with the book's data and receipts of three seeds of one variant."""
    shutil.copytree(ROOT / "book/data", tmp_path / "book/data")
    for folder in ("notebooks", "experiments"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "pyproject.toml").touch()
    shutil.copytree(three_seeds, tmp_path / "receipts")
    return tmp_path


def put(folder: Path, seed: int, hits: int, **change) -> Path:
    """A receipt on Scenes: ``hits`` of 500 images, and their captions, are found at once."""
    owner = np.repeat(np.arange(500), 5)
    i2t = np.where(np.arange(500) < hits, 0, 100)
    evidence = Evidence(i2t, i2t[owner], owner)
    data = {"name": "scenes", "split": "test", "fingerprint": BOOK.datasets["scenes"]["fingerprint"]}
    about = {"chapter": "01_vsepp", "variant": WARM, "dataset": data, "parameters": settings_of(SETTINGS)} | change
    intervals = bootstrap_intervals(Ranks(evidence.i2t, evidence.t2i), owner)
    receipt = make_receipt(
        **about, seed=seed, metrics=evidence.recalls("all 500"), intervals=intervals, protocol="all 500", seconds=1.0,
        device="cpu", evidence=evidence, rules={}, code=CODE,
    )  # fmt: skip
    return write_receipt(receipt, folder, evidence)


def relabel(path: Path, name: str, **change) -> Path:
    """A copy of a receipt and its ranks under another name, resealed."""
    receipt = json.loads(path.read_text(encoding="utf-8")) | change
    receipt["seal"] = seal_of(receipt)
    copy = path.with_name(name)
    shutil.copy(path.with_suffix(".npz"), copy.with_suffix(".npz"))
    copy.write_text(json.dumps(receipt), encoding="utf-8")
    return copy


def test_every_committed_receipt_is_good() -> None:
    assert " receipts good" in check_folder(ROOT)


def test_a_forged_copy_under_another_name_replaces_no_seed(root: Path) -> None:
    better = put(root / "elsewhere", 5, 500)
    for suffix in (".json", ".npz"):
        shutil.copy(better.with_suffix(suffix), root / f"receipts/01_vsepp/zzz{suffix}")
    for read in (lambda: Ledger(root).receipts, lambda: check_folder(root)):
        with pytest.raises(ItmError, match=r"zzz\.json: found a receipt under another name"):
            read()


def test_a_receipt_of_another_chapter_is_refused(root: Path) -> None:
    (root / "receipts/02_scan").mkdir()
    for path in sorted((root / "receipts/01_vsepp").glob("*s5.*")):
        shutil.copy(path, root / "receipts/02_scan")
    with pytest.raises(ItmError, match=r"expected 01_vsepp/VSE\+\+-hardest-after-warm-up_scenes_s5\.json"):
        Ledger(root).receipts  # noqa: B018


def test_a_relabelled_seed_is_refused(root: Path) -> None:
    """The best seed once more as seed 8: name, content and seal fit, the ranks are another seed's."""
    best = next((root / "receipts").rglob("*s7.json"))
    relabel(best, best.name.replace("s7", "s8"), seed=8)
    readers = (
        lambda: Ledger(root).receipts,
        lambda: check_folder(root),
        lambda: variant_receipts("01_vsepp", WARM, folder=root / "receipts"),
    )
    for read in readers:
        with pytest.raises(ItmError, match=r"_s8\.json: found the ranks of .*_s7\.json"):
            read()


def test_one_run_under_two_names_of_its_dataset_is_refused(root: Path) -> None:
    path = next((root / "receipts").rglob("*s5.json"))
    data = json.loads(path.read_text(encoding="utf-8"))["dataset"] | {"name": "scenes_precomp"}
    relabel(path, path.name.replace("_scenes_", "_scenes_precomp_"), dataset=data)
    with pytest.raises(ItmError, match="a second receipt of one run"):
        Ledger(root).receipts  # noqa: B018


def test_chapters_tables_refuse_a_receipt_under_another_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    path = next((root / "receipts").rglob("*s5.json"))
    copy = relabel(path, path.name.replace("s5", "s5_again"))
    with pytest.raises(ItmError, match="a receipt under another name"):
        variant_receipts("01_vsepp", WARM)
    for suffix in (".json", ".npz"):
        copy.with_suffix(suffix).unlink()
    data = {"name": "scenes", "split": "dev", "fingerprint": "d" * 64}
    tried = put(root / "receipts", 0, 200, dataset=data)
    assert tried.parent.name == "search"
    search_table("01_vsepp", [WARM])
    relabel(tried, "z_scenes_s0.json")
    with pytest.raises(ItmError, match="a receipt under another name"):
        search_table("01_vsepp", [WARM])
    with pytest.raises(ItmError, match="a receipt under another name"):
        check_folder(root)


def test_the_command_checks_the_whole_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    result = CliRunner().invoke(app, ["ledger", "--check-all"])
    assert result.exit_code == 0 and "3 receipts good; 3 of them on a test split" in result.output
    path = next((root / "receipts").rglob("*s5.json"))
    relabel(path, "zzz.json")
    result = CliRunner().invoke(app, ["ledger", "--check-all"])
    assert result.exit_code == 2 and "zzz.json: found a receipt under another name" in result.output


def test_what_is_set_aside_is_not_read(root: Path) -> None:
    path = next((root / "receipts").rglob("*s5.json"))
    (path.parent / "set_aside").mkdir()
    for suffix in (".json", ".npz"):
        path.with_suffix(suffix).rename(path.parent / "set_aside" / path.with_suffix(suffix).name)
    assert "2 receipts good" in check_folder(root)


# ---------------------------------------------------------------------------------------------- numbers that cannot be


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"rsum": 599.0}, "rsum 599.0"),
        ({"seed": 6}, "seed 6"),
        ({"seal": "0" * 64}, "a run without a receipt"),
    ],
)
def test_a_choice_speaks_of_receipts_that_are_there(root: Path, change: dict, message: str) -> None:
    receipt = json.loads(next((root / "receipts").rglob("*s5.json")).read_text(encoding="utf-8"))
    run = {"seed": 5, "setting": {}, "rsum": receipt["metrics"]["rsum"]["value"], "seal": receipt["seal"]}
    path = root / "receipts/01_vsepp/choices/vsepp_scenes_tuned.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"runs": [run | change], "baseline_runs": []}), encoding="utf-8")
    if not message:
        assert "3 receipts good" in check_folder(root)
        return
    with pytest.raises(ItmError, match=message):
        check_folder(root)


def forge(path: Path, change=None, **arrays: np.ndarray) -> None:
    """Other ranks beside a receipt, its recalls and seal fitted to them; then ``change`` of its content."""
    with np.load(path.with_suffix(".npz")) as file:
        evidence = Evidence(**({name: file[name] for name in ("i2t", "t2i", "owner")} | arrays))
    np.savez_compressed(path.with_suffix(".npz"), i2t=evidence.i2t, t2i=evidence.t2i, owner=evidence.owner)
    receipt = json.loads(path.read_text(encoding="utf-8"))
    receipt["ranks"] = evidence.digest
    receipt["metrics"] = {name: {"value": value} for name, value in evidence.recalls("all 500").items()}
    if change:
        change(receipt)
    path.write_text(json.dumps(receipt | {"seal": seal_of(receipt)}), encoding="utf-8")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"i2t": np.full(500, -1)}, "i2t ranks from -1 to -1, expected ranks from 0 to 2499"),
        ({"t2i": np.full(2500, 500)}, "t2i ranks from 500 to 500, expected ranks from 0 to 499"),
        ({"t2i": np.zeros(500, int), "owner": np.arange(500)}, "500 captions"),
        ({"owner": np.zeros(2500, int)}, "five captions for each of 500 images"),
        ({"i2t": np.full(500, 0.5)}, "500 whole numbers"),
    ],
)
def test_ranks_that_cannot_be_are_refused(root: Path, arrays: dict, message: str) -> None:
    forge(next((root / "receipts").rglob("*s5.json")), **arrays)
    for read in (lambda: Ledger(root).receipts, lambda: check_folder(root)):
        with pytest.raises(ItmError, match=message):
            read()


def drop_recalls(receipt: dict) -> None:
    receipt["metrics"] = {"dev_rsum": {"value": 300.0}}


def infinite(receipt: dict) -> None:
    receipt["metrics"]["rsum"] |= {"low": float("-inf"), "high": float("inf")}


def narrow(receipt: dict) -> None:
    value = receipt["metrics"]["rsum"]["value"]
    receipt["metrics"]["rsum"] |= {"low": value - 0.1, "high": value + 0.1}


def tomorrow(receipt: dict) -> None:
    receipt["run"]["finished"] = "2999-01-01T00:00:00+00:00"


def no_date(receipt: dict) -> None:
    receipt["run"]["finished"] = "yesterday"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_recalls, "no i2t_mean_rank|no i2t_r1"),
        (infinite, "rsum.high: inf is greater than the maximum of 600"),
        (narrow, "rsum in .*which its ranks give"),
        (tomorrow, "not in the future"),
        (no_date, "finished: 'yesterday'"),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, change, message: str) -> None:
    path = put(tmp_path, 5, 300)
    forge(path, change)
    with pytest.raises(ItmError, match=message):
        check_one(BOOK, path)


def test_a_commit_that_does_not_exist_is_refused_where_there_is_a_history(tmp_path: Path) -> None:
    receipt = {"run": {"finished": "2026-01-01T00:00:00+00:00", "commit": "d" * 40 + "+"}}
    check_circumstances(tmp_path, receipt, tmp_path)  # nobody to ask
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with pytest.raises(ItmError, match="commit dddddddddddd, expected a commit of this repository"):
        check_circumstances(tmp_path, receipt, tmp_path)


def test_five_folds_are_for_coco(root: Path) -> None:
    path = next((root / "receipts").rglob("*s5.json"))
    relabel(path, path.name.replace("_s5", "_5-folds-of-100_s5"), protocol="5 folds of 100")
    with pytest.raises(ItmError, match="only COCO is scored in folds"):
        Ledger(root).receipts  # noqa: B018


# ---------------------------------------------------------------------------------------------- receipts of schema 4


def rewrite(path: Path, change) -> None:
    """Change what a receipt says, and seal it again."""
    receipt = json.loads(path.read_text(encoding="utf-8"))
    change(receipt)
    path.write_text(json.dumps(receipt | {"seal": seal_of(receipt)}), encoding="utf-8")


def cold_receipt(root: Path, seed: int, hits: int) -> Path:
    return put(root / "receipts", seed, hits, variant=COLD, parameters=settings_of(COLD_SETTINGS))


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_every_new_receipt_has_the_intervals_of_its_ranks(root: Path, seed: int) -> None:
    rewrite(next((root / "receipts").rglob(f"*s{seed}.json")), narrow)
    with pytest.raises(ItmError, match=rf"_s{seed}\.json: found rsum in .*which its ranks give"):
        check_folder(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tomorrow, "not in the future"),
        (lambda receipt: receipt["run"].update(commit="d" * 40), "commit dddddddddddd, expected a commit of this"),
        (lambda receipt: receipt["run"].update(commit=None), "found no commit"),
        (lambda receipt: receipt["parameters"].update(epochs=40), "epochs = 40, expected 12 as in vsepp/scenes"),
        (lambda receipt: receipt["parameters"].pop("margin"), "margin = None, expected 0.2 as in vsepp/scenes"),
        (lambda receipt: receipt["parameters"].update(COLD_SETTINGS), "found .*as in vsepp/scenes"),
    ],
)
def test_every_new_receipt_has_circumstances_and_settings_that_can_be(root: Path, change, message: str) -> None:
    subprocess.run(["git", "clone", "-q", "--no-checkout", str(ROOT), str(root / "clone")], check=True)
    (root / "clone/.git").rename(root / ".git")
    assert "3 receipts good" in check_folder(root)
    rewrite(next((root / "receipts").rglob("*s6.json")), change)
    with pytest.raises(ItmError, match=message):
        check_folder(root)


def test_a_variant_that_no_experiment_plans_is_refused(root: Path) -> None:
    put(root / "receipts", 5, 400, variant="VSE++ secret", parameters=settings_of(SETTINGS))
    with pytest.raises(
        ItmError, match=r"the variant VSE\+\+ secret, expected one of experiments of 01_vsepp on scenes"
    ):
        check_folder(root)


def test_a_search_has_the_settings_that_its_name_says(root: Path) -> None:
    data = {"name": "scenes", "split": "dev", "fingerprint": "d" * 64}
    given = settings_of(SETTINGS | {"learning_rate": 0.5})
    put(root / "receipts", 100, 10, dataset=data, variant=f"{WARM} learning_rate=0.5", parameters=given)
    assert "4 receipts good" in check_folder(root)
    put(root / "receipts", 101, 11, dataset=data, variant=f"{WARM} learning_rate=0.25", parameters=given)
    with pytest.raises(ItmError, match=r"learning_rate = 0\.5, expected 0\.25"):
        check_folder(root)


def test_the_best_seed_relabelled_as_another_variant_is_refused(root: Path) -> None:
    """Also a switch that does nothing: it gives the ranks of the variant without it."""
    cold_receipt(root, 8, 307)
    with pytest.raises(ItmError, match=r"found the ranks of .*, expected other ranks for another variant"):
        check_folder(root)


def test_experiments_say_whose_ranks_may_be_equal(root: Path) -> None:
    cold_receipt(root, 5, 305)
    (root / "experiments").unlink()
    shutil.copytree(ROOT / "experiments", root / "experiments")
    path = root / "experiments/vsepp.yaml"
    content = load_yaml(path.read_text(encoding="utf-8"))
    keys = {one.settings["variant"]: one.name.split("/")[2] for one in EXPERIMENTS if "/scenes/" in one.name}
    content["datasets"]["scenes"]["variants"][keys[COLD]]["same_ranks_as"] = f"{keys[WARM]}, other"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert "4 receipts good" in check_folder(root)


def test_one_run_of_a_search_may_have_two_names(root: Path) -> None:
    """It tries the default, too."""
    data = {"name": "scenes", "split": "dev", "fingerprint": "d" * 64}
    rate = SETTINGS["learning_rate"]
    for variant in (WARM, f"{WARM} learning_rate={rate}"):
        put(root / "receipts", 100, 10, dataset=data, variant=variant)
    assert "5 receipts good" in check_folder(root)


def test_a_run_from_changed_code_is_not_accepted(root: Path) -> None:
    path = next((root / "receipts").rglob("*s6.json"))
    for clean, message in ((False, "its checkout had uncommitted changes"), (None, "nobody knows the commit")):
        rewrite(path, lambda receipt, clean=clean: receipt["run"].update(clean=clean))
        with pytest.raises(ItmError, match=f"a run that verdicts do not count: {message}"):
            check_one(Ledger(root), path)

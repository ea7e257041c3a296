"""The model of a finished run. DCPA is trained in two stages, and the sum of both ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from itm_lab.data.disk import read_json
from itm_lab.finished_run import find_checkpoint, load_matcher
from itm_utils.errors import input_error
from itm_utils.matcher import Matcher
from itm_utils.models.dcpa import DCPA

INTRA, INTER = "intra", "inter"  # folders of DCPA's two stages
# Folders of a model that ranks by itself: of DCPA in one training, of chapter 10's second round, and of chapter 01.
ALONE = (INTRA, "joint", "final", "train")


def open_model(run: Path) -> tuple[Matcher, dict[str, Any], Path]:
    """The model that ranks in a run, what its checkpoint says of its data, and the checkpoint's path.

    run: its folder, or a checkpoint. Of a run in two stages the folder of one, or its checkpoint, is that stage alone.
    """
    if not (run / INTER).is_dir():
        path = find_checkpoint(next((run / name for name in ALONE if (run / name).is_dir()), run))
        return *load_matcher(path), path
    path = find_checkpoint(run / INTER)
    inter, known = load_matcher(path)
    receipt = _receipt(run)
    intra, _ = load_matcher(find_checkpoint(_stage_one(run, receipt)))
    arguments = [{name: value for name, value in one.config.items() if name != "image_dim"} for one in (intra, inter)]
    model = DCPA(inter.config["image_dim"], *arguments, intra_weight=receipt["parameters"]["intra_weight"])
    model.intra.load_state_dict(intra.state_dict())
    model.inter.load_state_dict(inter.state_dict())
    return model, known, path


def _receipt(run: Path) -> dict[str, Any]:
    """The receipt of a finished run: it holds the weight of each stage, and where stage one is."""
    for path in sorted(run.glob("[0-9]*/*.json")):
        found = read_json(path, "a receipt")
        if "intra_weight" in found.get("parameters", {}):
            return found
    expected = "that of a finished run, which says how its two stages are added"
    raise input_error(run, "no receipt", expected, f"Let the run end, or give one stage: {run / INTER}.")


def _stage_one(run: Path, receipt: dict[str, Any]) -> Path:
    """Its folder: the run's own, or one that several runs share, named from the folder in which the recipes are."""
    shared = receipt["parameters"].get("stage_one", "").format(seed=receipt["seed"])
    if not shared:
        return run / INTRA
    places = [folder / shared for folder in (Path.cwd(), *run.absolute().parents)]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise input_error(shared, "no such folder", f"stage one of {run}", f"Give stage two alone: {run / INTER}.")
    return found

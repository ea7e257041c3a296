"""Good files, damaged as Hypothesis draws it, for the readers: each must accept what it is given or say one clear line."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from damage import bytes_of, values_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from killed_mining import SETTINGS, open_toy
from killed_photos import Tiny
from nbformat import v4
from PIL import Image
from toy_dataset import write_entities, write_toy_dataset
from workloads import convert, prepare_photos, prepare_tsv

from itm_lab.data import bottom_up
from itm_lab.data.entities import entities_grounding
from itm_lab.data.karpathy import read_karpathy
from itm_lab.data.tsv import decode, read_tsv
from itm_lab.evidence.ledger import Ledger
from itm_lab.evidence.rank_check import check_circumstances, check_intervals, check_ranks
from itm_lab.experiments.choice import Selection, chosen_setting
from itm_lab.experiments.experiment_files import expand, find_experiment, read_experiments, read_overrides, read_seeds
from itm_lab.experiments.plan import plan_searches
from itm_lab.finished_run import load_matcher
from itm_lab.index.store import MANIFEST, Encoder, Source, create_index, open_index
from itm_lab.notebook_io import read_notebook
from itm_lab.parity.published import evaluate_published
from itm_lab.photos import extract as extraction
from itm_lab.photos.captions import read_lines
from itm_lab.photos.image_files import UnreadableError, read_image
from itm_lab.records.nested_yaml import load_yaml
from itm_lab.records.parameters import notebook_model
from itm_lab.records.receipts import Evidence, make_receipt, read_evidence, read_receipt, seal_of, write_receipt
from itm_lab.records.scores import read_scores, write_scores
from itm_utils import mining
from itm_utils.data.offline import read_lists
from itm_utils.data.precomp import open_split
from itm_utils.data.text_encoder import MINI_FOLDER, load_text_encoder
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError
from itm_utils.matcher import Scores
from itm_utils.models.scan import SCAN
from itm_utils.training.checkpoints import read_checkpoint, save_model, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ACCEPTED, CLEAR, TRACEBACK = "accepted", "one clear line", "traceback"


@dataclass(frozen=True)
class Reader:
    """write: a good file in an empty folder, and its path. read: what opens it, and whatever lies beside it.

    tree: the file holds JSON or YAML, and its values are damaged too. seal: what makes a changed tree pass for whole.
    raw: its bytes are damaged as well.
    """

    write: Callable[[Path], Path]
    read: Callable[[Path], Any]
    tree: bool = False
    seal: Callable[[Any], Any] = lambda tree: tree
    raw: bool = True

    def damages(self, path: Path) -> dict[str, SearchStrategy[bytes]]:
        """Kind of damage → what may become of the file at ``path``."""
        content = path.read_bytes()
        found = bytes_of(content) if self.raw else {}
        if self.tree:
            found |= {kind: drawn.map(self.dumped) for kind, drawn in values_of(load_yaml(content)).items()}
        return found

    def dumped(self, tree: Any) -> bytes:
        """JSON, which is YAML as well."""
        return json.dumps(self.seal(tree)).encode()


def outcome_of(read: Callable[[], Any]) -> tuple[str, str]:
    """What came of reading one damaged file, and the traceback if it was one."""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            read()
    except (ItmError, UnreadableError) as error:
        return (CLEAR, "") if str(error).isprintable() else (TRACEBACK, f"an error of several lines: {error!r}")
    except Exception:
        return TRACEBACK, traceback.format_exc()[-3000:]
    return ACCEPTED, ""


def read_damaged(reader: Reader, folder: Path, of_each: int) -> Iterator[tuple[str, Counter[str]]]:
    """(kind of damage, outcomes) for every kind, each drawn up to ``of_each`` times."""
    path = fresh(reader, folder)
    good = {one: one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}
    damages = reader.damages(path)
    reader.read(path)  # whole, it is accepted
    for kind, drawn in damages.items():
        yield kind, draw(drawn, of_each, lambda content: read_content(reader, path, content, good))


def fresh(reader: Reader, folder: Path) -> Path:
    """A good file in a folder that holds nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return reader.write(folder)


def read_content(reader: Reader, path: Path, content: bytes, good: dict[Path, bytes]) -> tuple[str, str]:
    """Read a file with other bytes, everything around it as it was (a reader may write there)."""
    folder = Path(os.path.commonpath([one.parent for one in good]))
    for other in folder.rglob("*"):
        if other.is_file() and other not in good:
            other.unlink()
    for other, before in good.items():
        if other != path and (not other.is_file() or other.read_bytes() != before):
            other.parent.mkdir(parents=True, exist_ok=True)
            other.write_bytes(before)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return outcome_of(lambda: reader.read(path))


def draw(drawn: SearchStrategy[Any], number: int, attempt: Callable[[Any], tuple[str, str]]) -> Counter[str]:
    """Outcomes of so many draws, the same at every call; of a traceback the smallest input is looked for and shown."""
    outcomes: Counter[str] = Counter()
    searching = False

    @settings(
        max_examples=number, derandomize=True, database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    @given(drawn)
    def strike(content: Any) -> None:
        nonlocal searching
        outcome, said = attempt(content)
        outcomes[outcome] += not searching  # what the search for a smaller one finds is not counted
        if outcome == TRACEBACK:
            searching = True
            raise AssertionError(f"{said}\nfor {content!r:.1000}")

    try:
        strike()
    except AssertionError as error:
        print(error)
    return outcomes


# -- good files -------------------------------------------------------------------------------------------------------


def text(name: str, content: str) -> Callable[[Path], Path]:
    """One file of text."""

    def write(folder: Path) -> Path:
        (folder / name).write_text(content, encoding="utf-8")
        return folder / name

    return write


def toy(name: str, images: int = 4) -> Callable[[Path], Path]:
    """A file of a small dataset."""

    def write(folder: Path) -> Path:
        write_toy_dataset(folder, {"train": images})
        np.save(folder / "train_owners.npy", np.repeat(np.arange(images), 5))
        return folder / name

    return write


def checkpoint(folder: Path) -> Path:
    write_checkpoint(folder / "c.safetensors", {"model.w": torch.ones(3)}, {"step": 1})
    return folder / "c.safetensors"


def model(folder: Path) -> Path:
    save_model(folder / "best.safetensors", SCAN(12, 24, width=4, word_dim=4), {"fingerprint": "0"})
    return folder / "best.safetensors"


def scores(folder: Path) -> Path:
    write_scores(folder / "s.safetensors", Scores.same(torch.rand(2, 10)))
    return folder / "s.safetensors"


def receipt(folder: Path) -> Path:
    evidence = Evidence(np.array([0, 3]), np.arange(10) % 2, np.repeat([0, 1], 5))
    about = {"chapter": "02_scan", "variant": "a", "seed": 0, "parameters": {}, "seconds": 1.0, "device": "cpu"}
    data = {"name": "toy", "split": "test", "fingerprint": "0" * 64}
    made = make_receipt(**about, dataset=data, metrics=evidence.recalls("all"), evidence=evidence)
    return write_receipt(made, folder, evidence)


def ranks(folder: Path) -> Path:
    return receipt(folder).with_suffix(".npz")


def resealed(tree: Any) -> Any:
    """A forger seals what he has changed."""
    if isinstance(tree, dict) and "seal" in tree:
        tree["seal"] = seal_of(tree)
    return tree


def unsealed(tree: Any) -> Any:
    """Notes from before there were seals have none, and are read as they are."""
    return {name: value for name, value in tree.items() if name != "seal"} if isinstance(tree, dict) else tree


def check_wholly(path: Path) -> None:
    """All that `itm ledger --check` asks of the numbers of a receipt."""
    content = read_receipt(path)
    check_ranks(content, read_evidence(path), path)
    check_intervals(content, read_evidence(path), path)
    check_circumstances(path.parent, content, path)
    Ledger(ROOT).place(content, path)


def image(folder: Path) -> Path:
    Image.new("RGB", (40, 30), (200, 40, 40)).save(folder / "p.png")
    return folder / "p.png"


def tsv(folder: Path) -> Path:
    prepare_tsv(folder / "in")
    return folder / "in/a.tsv"


def read_rows(path: Path) -> None:
    for line in read_tsv(path):
        decode(line)


def tsv_journal(folder: Path) -> Path:
    """That of a conversion which ended before its files got their places."""
    tsv(folder)
    before, bottom_up._Conversion._publish = bottom_up._Conversion._publish, stop
    try:
        convert(folder / "in", folder / "work")
    except InterruptedError:
        pass
    finally:
        bottom_up._Conversion._publish = before
    return folder / "work/out/.dev_unfinished" / bottom_up.JOURNAL


def entities(kind: str, ending: str) -> Callable[[Path], Path]:
    """A file of Flickr30K Entities, beside the dataset it annotates."""

    def write(folder: Path) -> Path:
        write_toy_dataset(folder / "data", {"test": 1})
        write_entities(folder / "entities", folder / "data", ["1"])
        return folder / "entities" / kind / f"1.{ending}"

    return write


def read_entities(path: Path) -> None:
    entities_grounding(path.parents[1], open_split(path.parents[2] / "data", "test"), ["1"])


def lists(name: str) -> Callable[[Path], Path]:
    """A file of mined lists, beside their dataset."""

    def write(folder: Path) -> Path:
        write_toy_dataset(folder / "data", {"train": 8})
        mining.mine(
            *open_toy(folder / "data"), folder / "lists", **(SETTINGS | {"texts_per_image": 4, "images_per_text": 3})
        )
        return folder / "lists" / name

    return write  # fmt: skip


def read_mined(path: Path) -> None:
    read_lists(path.parent, open_split(path.parents[1] / "data", "train"))


@cache
def golden() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Options and weights of a reference case of public SCAN."""
    case = ROOT / "tests/golden/scan/given_t2i_lse_f30k"
    arrays = np.load(case.with_suffix(".npz"))
    weights = {name[2:]: torch.from_numpy(arrays[name]) for name in arrays.files if name.startswith("w.")}
    return json.loads(case.with_suffix(".json").read_text(encoding="utf-8"))["options"], weights


def published(folder: Path, opt: Any = None) -> Path:
    """A checkpoint as the public training scripts save it, with a dataset and vocabulary that fit. opt: odd options."""
    options, weights = golden()
    write_toy_dataset(folder / "data", {"test": 4}, width=options["img_dim"])
    words = Vocabulary.load(folder / "data/toy_vocab.json").word2idx
    Vocabulary(words | {f"word{n}": n for n in range(len(words), options["vocab_size"])}).save(folder / "vocab.json")
    parts = [{k[8:]: v for k, v in weights.items() if k.startswith(side)} for side in ("img_enc.", "txt_enc.")]
    content = {
        "epoch": 3,
        "model": parts,
        "opt": argparse.Namespace(**options) if opt is None else opt,
        "best_rsum": 1.0,
    }
    torch.save(content, folder / "model_best.pth.tar")
    return folder / "model_best.pth.tar"


def index_file(name: str) -> Callable[[Path], Path]:
    """A file of an index of twenty vectors."""

    def write(folder: Path) -> Path:
        vectors = np.random.default_rng(0).normal(size=(20, 4))
        index = create_index(folder / "shelf", "images", 4, Encoder("run", "0", "SCAN"))
        return index.add(Source("data", "test", "0"), vectors).folder / name

    return write


def ask_index(path: Path) -> None:
    """Open an index and search all of it."""
    open_index(path.parent).search(np.ones((1, 4)), 3)


def about_published(folder: Path) -> Path:
    """Name and options of a published checkpoint as JSON: ``read`` puts them into one."""
    return text("options.json", json.dumps({"model": "scan", "options": golden()[0]}))(folder)


def read_options(path: Path) -> None:
    """What `itm eval` makes of a checkpoint that loads, and says odd things of itself."""
    content = json.loads(path.read_bytes())
    given = content.get("options") if isinstance(content, dict) else content
    name = content.get("model") if isinstance(content, dict) else "scan"
    public = published(path.parent, argparse.Namespace(**given) if isinstance(given, dict) else given)
    evaluate_published(public, str(name), path.parent / "data", path.parent / "vocab.json", "test")


def encoder(name: str) -> Callable[[Path], Path]:
    """A file of a folder with a BERT."""

    def write(folder: Path) -> Path:
        shutil.copytree(MINI_FOLDER, folder / "bert")
        return folder / "bert" / name

    return write


def photos_journal(folder: Path) -> Path:
    """The note of an extraction that ended after its last batch, before its folder got its place."""
    prepare_photos(folder / "in")
    before, extraction.give_place = extraction.give_place, stop
    extraction.BATCH = 4
    try:
        continue_photos(folder / "out/x")
    except InterruptedError:
        pass
    finally:
        extraction.give_place = before
    return folder / "out/.x.unfinished" / extraction.STATE


def stop(*_: Any) -> None:
    raise InterruptedError


def continue_photos(beside: Path) -> None:
    """Extract features, or the rest of them."""
    folder = beside.parents[1]
    shutil.rmtree(folder / "out/x", ignore_errors=True)
    made = folder / "in/photos", folder / "in/captions.csv", folder / "out/x"
    extraction.extract(*made, "2,1,1", least=1, network=Tiny())


def searching() -> Selection:
    """The first search that the experiments ask for, as if none had run yet."""
    name = next(name for name, one in read_experiments(ROOT).items() if one.select)
    return plan_searches(ROOT, [name], "", [], ROOT / "no receipts")[0]


def choice(folder: Path) -> Path:
    """A record of a search, its runs made up."""
    selection = searching()
    names = list(selection.select.grid)
    runs = [{"setting": {name: job.parameters[name] for name in names}, "rsum": 400.0 + n, "seed": job.seed, "seal": "0"}
            for n, job in enumerate(selection.tried())]  # fmt: skip
    chosen = chosen_setting([(run["setting"], run["rsum"]) for run in runs], bool(selection.select.settings))
    path = selection.path(folder)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(selection.about() | {"chosen": chosen, "runs": runs}), encoding="utf-8")
    return path


def read_choice(path: Path) -> None:
    """The experiment with the recorded settings, and the runs that it makes."""
    searching().chosen(path.parents[2]).values()


def experiments(folder: Path) -> Path:
    """A small checkout: one chapter's experiments beside its notebook."""
    for place in ("notebooks/02_scan.ipynb", "experiments/scan.yaml", "pyproject.toml"):
        (folder / place).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / place, folder / place)
    return folder / "experiments/scan.yaml"


def short_experiments(folder: Path) -> Path:
    """One of each thing that a file of experiments may hold."""
    path = experiments(folder)
    variant = {"about": "a", "variant": "A", "table": "t", "extends": "slow", "seeds": "0-1"}
    chosen = {"search_baseline": "a", "select": {"grid": {"margin": [0.1, 0.2]}, "on": "dev", "seeds": 1}}
    content = {
        "base": {"epochs": 1},
        "groups": {"slow": {"learning_rate": 0.1}},
        "datasets": {
            "f30k": {"base": {"dataset": "data/{dataset}"}, "variants": {"a": variant, "b": variant | chosen}}
        },
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def read_all_experiments(path: Path) -> None:
    """Every experiment of the file, with all of its settings."""
    for one in read_experiments(path.parents[1]).values():
        one.values()


def notebook(folder: Path) -> Path:
    cells = [v4.new_markdown_cell("# A"), v4.new_code_cell("epochs: int = 1  # passes\nname: str = 'a'")]
    cells[1].metadata["tags"] = ["parameters"]
    (folder / "02_a.ipynb").write_text(v4.writes(v4.new_notebook(cells=cells)), encoding="utf-8")
    return folder / "02_a.ipynb"


def parameters(folder: Path) -> Path:
    """The parameters of a run, as papermill is given them."""
    values = find_experiment(ROOT, "scan/f30k/t2i_avg").values()
    return text("p.yaml", yaml.safe_dump(values))(folder)


def read_parameters(path: Path) -> None:
    """As a chapter checks what papermill has put into it."""
    from itm_utils.validation import validated

    given = load_yaml(path.read_bytes())
    if isinstance(given, dict):
        validated(notebook_model(ROOT / "notebooks/02_scan.ipynb"), given, "02_scan")


KARPATHY = {
    "images": [{"filename": "1.jpg", "imgid": 0, "split": "train", "sentences": [{"raw": "a dog", "tokens": []}]}]
}


def option(read: Callable[[str], Any]) -> Callable[[Path], Any]:
    """A word of a command line, in any bytes."""
    return lambda path: read(path.read_bytes().decode("utf-8", "surrogateescape"))


def read_option_p(word: str) -> None:
    experiment = find_experiment(ROOT, "vsepp/f30k/vsepp")
    experiment.values(read_overrides(experiment, [word]))


SPLIT = ("caps.txt", "ims.npy", "boxes.npy", "sizes.npy", "ids.txt", "owners.npy")
BERT = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
READERS = {f"a split, {name}": Reader(toy(f"train_{name}"), lambda path: open_split(path.parent, "train")) for name in SPLIT} | {
    "a vocabulary": Reader(toy("toy_vocab.json"), Vocabulary.load, tree=True),
    "a checkpoint": Reader(checkpoint, read_checkpoint),
    "a checkpoint, as a model": Reader(model, load_matcher),
    "scores": Reader(scores, read_scores),
    "a receipt": Reader(receipt, read_receipt, tree=True),
    "a receipt, sealed again": Reader(receipt, check_wholly, tree=True, seal=resealed),
    "a receipt's ranks": Reader(ranks, lambda path: read_receipt(path.with_suffix(".json"))),
    "a photograph": Reader(image, lambda path: read_image(path, 16)),
    "captions of photographs": Reader(text("c.csv", "a.jpg,two dogs\nb.jpg,a cat\n"), read_lines),
    "the journal of an extraction": Reader(photos_journal, lambda path: continue_photos(path.parents[1] / "x"), tree=True, seal=unsealed),
    "bottom-up features (TSV)": Reader(tsv, read_rows),
    "the journal of a conversion": Reader(tsv_journal, lambda path: convert(path.parents[3] / "in", path.parents[2]), tree=True, seal=unsealed),
    "Entities, boxes": Reader(entities("Annotations", "xml"), read_entities),
    "Entities, sentences": Reader(entities("Sentences", "txt"), read_entities),
    "Karpathy's splits": Reader(text("k.json", json.dumps(KARPATHY)), read_karpathy, tree=True),
    "offline lists, texts": Reader(lists("texts.npy"), read_mined),
    "offline lists, manifest": Reader(lists("manifest.json"), read_mined, tree=True),
    "an index, manifest": Reader(index_file(MANIFEST), ask_index, tree=True),
    "an index, segment": Reader(index_file("segment-00000.faiss"), ask_index),
    "a published checkpoint": Reader(published, lambda path: evaluate_published(path, "scan", path.parent / "data", path.parent / "vocab.json", "test")),
    "a published checkpoint's options": Reader(about_published, read_options, tree=True, raw=False),
    "a recorded choice": Reader(choice, read_choice, tree=True),
    "an experiment file": Reader(experiments, expand),
    "an experiment file, its values": Reader(short_experiments, read_all_experiments, tree=True),
    "a notebook": Reader(notebook, read_notebook, tree=True),
    "a notebook's parameters": Reader(notebook, notebook_model, tree=True),
    "parameters of a run": Reader(parameters, read_parameters, tree=True, raw=False),
    "option --seeds": Reader(text("o", "0-4,7"), option(read_seeds)),
    "option -p": Reader(text("o", "width=32"), option(read_option_p)),
} | {
    f"a text encoder, {name}": Reader(encoder(name), lambda path: load_text_encoder(path.parent), tree=name.endswith(".json"))
    for name in BERT if (MINI_FOLDER / name).is_file()
}  # fmt: skip

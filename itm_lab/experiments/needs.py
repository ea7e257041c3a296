"""What runs need before any of them starts: data, text encoder, runs that come before, annotations, disk.

Every need is named with what is there and with the command that makes it, or where it comes from. ``itm run --dry-run``
prints them all; ``itm run`` stops with one error that lists those that are not met.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from itm_lab.data.check import get_advice
from itm_lab.data.check_entities import KINDS
from itm_lab.data.disk import counted, existing_folder, free_space, gigabytes
from itm_lab.data.entities import PHRASES, entities_name
from itm_lab.data.registry import ENTITIES_PAGE, KARPATHY_PAGE, KNOWN, NEEDED, PER_IMAGE
from itm_lab.data.report import DAMAGED, MISSING, NOTE, OK, CheckResult, table
from itm_lab.experiments.chain import built_on
from itm_lab.experiments.cost import GPUS, Costs, bytes_of_weights, cost_key, sizes_of, tokens_of, written
from itm_lab.experiments.experiment_files import read_experiments
from itm_lab.experiments.runner import Job, expected_receipt, is_finished, open_data
from itm_utils.cache import cache_root
from itm_utils.data.precomp import PrecompSplit
from itm_utils.data.text_encoder import MINI
from itm_utils.errors import ItmError, input_error
from itm_utils.files import read_text
from itm_utils.mining import longest_lists
from itm_utils.training import Stage

PLANNED = "planned"  # not there yet: a run of this plan makes it
LEFT_BY = {"online_run": "final/log.jsonl", "baseline": "attention.npz"}  # what a run that is built on leaves
ENCODER_FILES = (
    ("config.json",),
    ("model.safetensors", "model.safetensors.index.json"),
    ("tokenizer.json", "vocab.txt"),
)
PFAN = "PFAN's positions"
PICKLED = "pytorch_model.bin"
OTHER_DATA = "book/datasets.md says which datasets there are, and how features of your own become such a folder."
TRUE = ("1", "ON", "YES", "TRUE")  # as the model hub reads HF_HUB_OFFLINE


@dataclass(frozen=True)
class Need:
    """Something that runs read. what: its name. found: what is there. get: the command that makes it, or its source.

    state: ok, planned (a run of the plan makes it), note (no reason to stop), missing or damaged.
    """

    what: str
    state: str
    found: str
    get: str = ""

    @property
    def unmet(self) -> bool:
        return self.state in (MISSING, DAMAGED)

    def __str__(self) -> str:
        return f"{self.what}: found {self.found.rstrip('.')}. {self.get}".strip()


def needs_table(needs: Iterable[Need]) -> Iterator[str]:
    """Lines of a table, and below it how to get each thing."""
    yield from table([CheckResult(need.what, need.state, need.found, need.get) for need in needs])
    yield ""


def require(jobs: list[Job], results: Path) -> None:
    """Stop before anything starts if something is missing, with one error that names all of it."""
    unmet = [str(need) for need in needs_of(jobs, results) if need.unmet]
    if len(unmet) == 1:
        raise ItmError(unmet[0])
    if unmet:
        listed = " ".join(f"({number}) {one}" for number, one in enumerate(unmet, start=1))
        raise input_error("itm run", f"{len(unmet)} things missing", "all that these runs need", listed)


def needs_of(jobs: list[Job], results: Path, costs: Costs | None = None) -> list[Need]:
    """All that some runs need, each once. costs: of the plan, for what its GPU must hold."""
    plan = Plan(jobs, results)
    found: dict[str, Need] = {}
    needs = list(plan.needs())
    for need in (*needs, *disk_needs(plan.waiting)):
        if need.what not in found or (need.unmet and not found[need.what].unmet):
            found[need.what] = need
    return [*found.values(), *memory_notes(plan, costs)]


class Plan:
    """The runs of a command, and which of them are finished. results: where receipts are."""

    def __init__(self, jobs: list[Job], results: Path) -> None:
        self.jobs, self.results = jobs, results
        self.by_folder = {job.parameters["run_dir"]: job for job in jobs}
        self.waiting: list[Job] = []  # those that will run, once `needs` has been asked

    def needs(self) -> Iterator[Need]:
        """Of each run that is not finished; what its data must hold only where that can be read."""
        for job in self.jobs:
            found = list(data_needs(job))
            yield from found
            readable = not any(need.unmet or need.state == PLANNED for need in found)
            if readable and (finished := finished_need(job, self.results)) is not None:
                yield from () if finished.state == OK else (finished,)
                continue
            self.waiting.append(job)
            yield from encoder_needs(job)
            yield from self.run_needs(job)
            yield from self.shared_needs(job)
            yield from annotation_needs(job, readable)
            if job.parameters["dataset"] != "scenes":  # it has all of them
                yield from box_needs(job, readable)
            if readable:
                yield from size_needs(job)

    def run_needs(self, job: Job) -> Iterator[Need]:
        """Runs that this one is built on: AOQ's online run, the baseline of CCR and CCS."""
        for name, folder in built_on(job).items():
            kind = {"online_run": "online run", "baseline": "baseline run"}[name]
            before, left = self.by_folder.get(folder), job.root / folder / LEFT_BY[name]
            what, command = f"{kind} {folder}", command_of(job, folder)
            if before is not None and not self.is_done(before):
                yield Need(what, PLANNED, "a run of this plan", command)
            elif not left.is_file():
                hint = "its receipt is there, its folder is not: move the receipt away, and " if before else ""
                yield Need(what, MISSING, f"no {LEFT_BY[name]} there", hint + command)
            elif not any((job.root / folder).glob("[0-9]*/**/*.json")):
                yield Need(what, MISSING, "a run without a receipt: it has not ended", command)
            else:
                yield Need(what, OK, "finished", command)

    def is_done(self, job: Job) -> bool:
        """Whether a run of the plan is finished, and so will not run."""
        found = finished_need(job, self.results) if is_built(job) and job.data.is_dir() else None
        return found is not None and found.state == OK

    def shared_needs(self, job: Job) -> Iterator[Need]:
        """Trainings that runs share, and mined lists: whoever comes first makes them."""
        given = job.parameters
        if given.get("training") == "two" and given.get("stage_one"):
            folder = given["stage_one"].format(seed=job.seed)
            there = any((job.root / folder).glob("*.safetensors"))
            found = (OK, "trained, or begun") if there else (PLANNED, "the first run that needs it trains it, for all")
            yield Need(f"stage one {folder}", *found, command_of(job, str(Path(folder).parent)))
        if "captions_mined" in given and (given["kind"] != "online" or given["round_one"]):
            folder = (given["round_one"] or given["run_dir"]).format(seed=job.seed)
            there = (job.root / folder / "lists/manifest.json").is_file()
            found = (
                (OK, "mined")
                if there
                else (PLANNED, "the first run that needs them trains the miner and mines, for all")
            )
            command = "`itm mine` makes such lists from any checkpoint; `itm run` needs no call of it."
            yield Need(f"offline negatives {folder}/lists", *found, command)


def command_of(job: Job, folder: str) -> str:
    """The command that makes the run in a folder."""
    for name, experiment in read_experiments(job.root, job.experiment.name.partition("/")[0]).items():
        if experiment.settings["run_dir"] == str(Path(folder).parent):
            return f"`itm run {name} --seeds {job.seed}`"
    return "Give the folder of a finished run."


def finished_need(job: Job, results: Path) -> Need | None:
    """None for a run that is not finished; a receipt of something else under its name is damage."""
    try:
        if not is_finished(job, results):
            return None
    except ItmError as error:
        return damage(error)
    return Need(str(expected_receipt(job, results)), OK, "finished")


def damage(error: ItmError, get: str = "") -> Need:
    """An error of a reader as a need."""
    what, _, rest = str(error).partition(": found ")
    return Need(what, DAMAGED, rest or "what cannot be read", get)


# Data ---------------------------------------------------------------------------------------------------------------


def data_needs(job: Job) -> Iterator[Need]:
    """The folder of a dataset, its files of the three splits, its vocabulary; then whether all of it fits together."""
    if not is_built(job):
        yield Need("Scenes", PLANNED, "not built yet: the first run builds it", "`itm scenes build`")
        return
    folder, name = job.data, job.parameters["dataset"]
    if not folder.is_dir():
        yield Need(name, MISSING, "no such folder", data_source(name, ""))
        return
    splits = dict.fromkeys(("train", "dev", job.parameters["evaluate_on"]))
    absent = [
        f"{split}_{ending}" for split in splits for ending in NEEDED if not (folder / f"{split}_{ending}").exists()
    ]
    for file in absent:
        yield Need(f"{name}/{file}", MISSING, "no such file", data_source(name, file))
    if not any(folder.glob("*_vocab.json")):
        yield Need(f"{name}/*_vocab.json", MISSING, "no vocabulary", f"`itm data vocabulary {name}`")
        return
    if absent:
        return
    try:
        train, dev, test = open_data(folder, job.parameters["evaluate_on"])
        assert job.facts
    except ItmError as error:
        yield damage(error, f"`itm data check` looks at every file of {name}.")
        return
    images = f"{train.n_images:,} images in train, {dev.n_images:,} in dev, {test.n_images:,} in {test.name}"
    yield Need(name, OK, f"{images}, and a vocabulary", data_source(name, ""))


def is_built(job: Job) -> bool:
    """Whether Scenes is there, if that is the dataset: to open it would build it."""
    if job.parameters["dataset"] != "scenes":
        return True
    return (cache_root() / scenes_name() / "manifest.json").is_file()


@cache
def scenes_name() -> str:
    """The name of the folder of Scenes: a hash of the source of its generator."""
    from itm_lab.scenes.build import ScenesSpec

    return ScenesSpec().folder_name()


def data_source(name: str, file: str) -> str:
    """Where a dataset folder, or a file of it, comes from."""
    folder = Path(name)
    for key, known in KNOWN.items():
        if known.folder == folder.name:
            return get_advice(known, key, folder.parent, file)
    return "`itm scenes build`" if name == "scenes" else OTHER_DATA


def size_needs(job: Job) -> Iterator[Need]:
    """Batches no larger than the training set, and lists of negatives no longer than there are negatives."""
    given, captions = job.parameters, job.captions
    sizes = [value for name, value in given.items() if name.endswith("batch_size")]
    if max(sizes) > captions:  # not every batch size is of a stage that is trained
        sizes = [stage.config.batch_size for stage in job.stages(vocabulary_size=1, image_dim=1)]
    found = f"{counted(captions, 'caption')} to train on"
    what = f"batches of {' and '.join(str(size) for size in sorted(set(sizes)))}"
    state = MISSING if max(sizes) > captions else OK
    names = [name for name in given if name.endswith("batch_size") and given[name] > captions]
    yield Need(
        what, state, found, f"-p {' -p '.join(f'{name}={captions}' for name in names)}, or less" if names else ""
    )
    if "captions_mined" in given and (given["kind"] != "online" or given["round_one"]):
        (train, *_), mined, kept = (
            open_data(job.data, given["evaluate_on"]),
            given["captions_mined"],
            given["captions_kept"],
        )
        of_image, of_caption = longest_lists(train)
        most = min(of_image, PER_IMAGE * of_caption + PER_IMAGE - 1)  # a fifth as many images for a caption
        fits = kept <= mined <= most
        what = f"lists of {mined} offline negatives, {kept} of them kept"
        get = "" if fits else f"-p captions_mined=N, at most {most}, and -p captions_kept=N, at most as many"
        yield Need(what, OK if fits else MISSING, f"{most:,} negatives for an image", get)


# Text encoder -------------------------------------------------------------------------------------------------------


def encoder_needs(job: Job) -> Iterator[Need]:
    """The frozen text encoder of a run whose captions come as token states."""
    if tokens_of(job):
        yield text_encoder_need(job.parameters["text_encoder"], job.root)


def text_encoder_need(name: str, root: Path) -> Need:
    """Whether a text encoder is there: with the package, as a folder, or in the local cache of the model hub."""
    what, copy = f"text encoder {name}", "or give -p text_encoder=FOLDER, a copy of it (book/datasets.md names one)."
    if name == MINI:
        return Need(what, OK, "comes with the package")
    if (root / name).is_dir():
        folder = root / name
        absent = [" or ".join(some) for some in ENCODER_FILES if not any((folder / one).is_file() for one in some)]
        if not absent:
            return Need(what, OK, "in this folder", "")
        pickled = "; weights as pickle are not loaded" if (folder / PICKLED).is_file() else ""
        return Need(what, MISSING, f"a folder without {', '.join(absent)}{pickled}", f"Copy all of it, {copy}")
    if (root / Path(name).parts[0]).is_dir() or Path(name).is_absolute():
        return Need(
            what, MISSING, "no such folder", "book/datasets.md says where to get a text encoder from a package index."
        )
    if is_cached(name):
        return Need(what, OK, "in the local cache of the model hub", "")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE:
        return Need(
            what, MISSING, "none on this disk, and HF_HUB_OFFLINE is set", f"Unset it: the first run fetches it; {copy}"
        )
    return Need(
        what, NOTE, "none on this disk: the first run fetches it from the model hub", f"`hf download {name}`, {copy}"
    )


def is_cached(name: str) -> bool:
    """Whether the local cache of the model hub has what a text encoder is read from."""
    from huggingface_hub import try_to_load_from_cache  # here: half of the plans do without it
    from huggingface_hub.errors import HFValidationError

    try:
        return all(any(isinstance(try_to_load_from_cache(name, one), str) for one in some) for some in ENCODER_FILES)
    except HFValidationError:  # no name of a model
        return False


# Annotations and boxes ----------------------------------------------------------------------------------------------


def annotation_needs(job: Job, readable: bool) -> Iterator[Need]:
    """Flickr30K Entities with the names of the images that are judged. A search on dev does without."""
    given = job.parameters
    if not given.get("entities") or given["evaluate_on"] == "dev":
        return
    folder, shown = job.root / given["entities"], given["entities"]
    if (kept := folder / f"{given['evaluate_on']}_{PHRASES}").is_file():
        yield Need(f"{shown}/{kept.name}", OK, "phrases and boxes of the split", "")
        return
    absent = [kind for kind in KINDS if not (folder / kind).is_dir()]
    if absent:
        get = f"{ENTITIES_PAGE}, unpacked to {shown}; or -p entities= leaves the attention metrics out"
        yield Need(shown, MISSING, f"no folder {' and no folder '.join(absent)}", get)
    ids = f"{given['dataset']}/{given['evaluate_on']}_ids.txt"
    if not given.get("image_names") and not (job.root / ids).is_file():
        yield Need(ids, MISSING, "no such file", names_source(job))
        return
    if not readable:
        return
    try:
        names = image_names(job)
    except ItmError as error:
        yield damage(error, names_source(job))
        return
    if not absent:
        yield names_need(job, names, folder, shown)


def image_names(job: Job) -> list[str]:
    """The file names of the judged images: from the list that a parameter names, else from the split's ids."""
    split = open_data(job.data, job.parameters["evaluate_on"])[2]
    if listed := job.parameters.get("image_names"):
        lines = read_text(job.root / listed, "the file name of an image in each line").split("\n")
        names: list[str] | None = [line.strip() for line in lines if line.strip()]
    else:
        names = split.ids
    if names is None or len(names) != split.n_images:
        raise input_error(str(listed), f"{len(names or ()):,} names", f"the file names of {split.n_images:,} images")
    return names


def names_source(job: Job) -> str:
    """The command that writes image names."""
    command = f"itm data ids {job.parameters['dataset']} {job.parameters['evaluate_on']} --karpathy FILE --set-aside"
    return f"`{command}`, with Karpathy's JSON of {KARPATHY_PAGE}; or -p image_names=FILE"


def names_need(job: Job, names: list[str], folder: Path, shown: str) -> Need:
    """Whether Entities has both files of every image."""
    for kind, ending in KINDS.items():
        files = [f"{entities_name(name)}{ending}" for name in names]
        absent = [file for file in files if not (folder / kind / file).is_file()]
        if absent:
            found = f"no such file, as for {len(absent):,} of {len(files):,} images"
            return Need(
                f"{shown}/{kind}/{absent[0]}", MISSING, found, f"Are these the images' names? {names_source(job)}"
            )
    return Need(shown, OK, f"phrases and boxes of all {counted(len(names), 'image')}", f"{ENTITIES_PAGE}, unpacked")


def box_needs(job: Job, readable: bool) -> Iterator[Need]:
    """Boxes and image sizes: of every split for PFAN's positions, of the judged one for attention metrics."""
    given, judged = job.parameters, job.parameters["evaluate_on"]
    if "grid" in given and given.get("base_model", "pfan") == "pfan" and given["position"] != "none":
        reader, names = PFAN, dict.fromkeys(("train", "dev", judged))
    elif given.get("entities") and judged != "dev":
        reader, names = "attention metrics", {judged: None}
    else:
        return
    opened = {split.name: split for split in open_data(job.data, judged)} if readable else {}
    for name in names:
        files = ["boxes.npy"]
        if name in opened and reads_sizes(opened[name], reader):
            files.append("sizes.npy")
        for file in (f"{given['dataset']}/{name}_{kind}" for kind in files):
            command = f"itm data convert-tsv FILE.tsv --out {given['dataset']} --split {name} --captions KARPATHY.json --most 5"
            get = f"`{command}` converts features with boxes; SCAN's package has none (book/datasets.md)"
            there = (job.root / file).is_file()
            yield Need(file, *((OK, f"for {reader}") if there else (MISSING, "no such file")), get)


def reads_sizes(split: PrecompSplit, reader: str) -> bool:
    """Whether boxes need the sizes of the images: PFAN's, unless they are its public code's; shares of the sides."""
    if split.boxes is None or split.boxes.shape[-1] != 4:
        return False
    return reader == PFAN or split.box_shares


# Disk and memory ----------------------------------------------------------------------------------------------------


def disk_needs(jobs: Iterable[Job]) -> Iterator[Need]:
    """Free space for all that runs on photographs will write, on each disk that they write to."""
    outstanding: dict[int, float] = {}
    places: dict[int, Path] = {}
    for path, size in space_of(jobs).items():
        there = existing_folder(path)
        disk = there.stat().st_dev
        outstanding[disk] = outstanding.get(disk, 0) + max(0.0, size - bytes_in(path))
        places.setdefault(disk, there)
    for disk, size in outstanding.items():
        free = free_space(places[disk])
        found = f"{gigabytes(free)} free, at most {gigabytes(round(size))} to be written"
        get = "Free some, or -p run_dir=FOLDER on another disk; ITM_CACHE moves the token states."
        what = f"disk of {places[disk]}"
        yield Need(what, *((OK, found) if free >= size else (MISSING, found, get)))


def space_of(jobs: Iterable[Job]) -> dict[Path, float]:
    """Path → bytes that runs write there at most, shared folders once. Models without numbers say how large weights are."""
    found: dict[str, float] = {}
    weights: dict[tuple[Any, ...], list[tuple[Stage, int]]] = {}
    for job in jobs:
        if job.parameters["dataset"] == "scenes":  # small
            continue
        try:
            sizes = sizes_of(job)
        except ItmError:  # neither data nor a published size: that the data is missing is said elsewhere
            continue
        if (key := cost_key(job)) not in weights:
            stages = job.stages(sizes.vocabulary, sizes.image_dim)
            weights[key] = [(stage, bytes_of_weights(stage.model)) for stage in stages]
        found |= written(job, sizes, weights[key], bool(job.parameters.get("decoupled")))
    return {Path(path): size for path, size in found.items()}


def bytes_in(path: Path) -> int:
    """What a file or folder holds already; 0 where there is none."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def memory_notes(plan: Plan, costs: Costs | None) -> Iterator[Need]:
    """What the GPU has to hold, against this machine's or the one that the plan is for: an estimate, so only a note."""
    jobs = [job for job in plan.waiting if job.parameters["dataset"] != "scenes" and job.parameters["device"] != "cpu"]
    if costs is None or not jobs:
        return
    try:
        held = max(costs.of(job).held for job in jobs)
    except ItmError:  # no sizes
        return
    if torch.cuda.is_available():
        name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    else:
        name, memory = f"{costs.gpu}; PyTorch sees none here", GPUS[costs.gpu][1] * 2**30
    found = f"about {held / 2**30:.1f} GiB held at most, of {memory / 2**30:.0f} GiB ({name})"
    yield Need("GPU memory", NOTE if held > memory or not torch.cuda.is_available() else OK, found)

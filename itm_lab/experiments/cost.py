"""What a command of ``itm run`` would do, and what it would cost."""

from __future__ import annotations

import importlib
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from itm_lab.data.opening import open_splits
from itm_lab.experiments.recipes import (
    find_recipe,
    read_overrides,
    read_recipe,
    read_seeds,
    read_value,
    recipes_of_table,
)
from itm_lab.experiments.runner import SEARCH_SEED, Job, grid_jobs, make_jobs, search_jobs
from itm_lab.records.parameters import ASIDE
from itm_lab.records.receipts import read_receipt
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError, input_error
from itm_utils.matcher import Encoded, ImageBatch, Matcher, OfflineNegatives, PairBatch, TextBatch
from itm_utils.models.ccr_ccs import AttentionConstraintLoss
from itm_utils.models.mmca import HardNegativeTripletLoss
from itm_utils.models.vsepp import HingeTriplet
from itm_utils.scoring import BATCH, BUDGET
from itm_utils.training.loop import KEPT, Objective, compiled_scores
from itm_utils.training.schedule import NUMBERS

# Peak single-precision arithmetic in 10^12 operations a second, and memory in GiB, as the makers state them.
GPUS = {"RTX 3090": (35.6, 24), "RTX 4090": (82.6, 24), "V100": (15.7, 16), "A100": (19.5, 40), "H100": (67.0, 80)}
USED = 0.25  # part of the peak that such models reach; a guess, and the plan says so: --measure replaces it
WORDS = 14  # of an average caption with its start and end symbol, where the data is not there to count
REGIONS = 36
BERT_TOKEN = 12 * 24 * 768**2  # operations of BERT base for a token: 12 layers of 12 d^2 weights, two for each
TIMED = 5  # training steps of which --measure takes the median, after two to warm up
# Of these there is at least one; what is least in a training, its settings say. Every other whole number may be 0.
FROM_ONE = (
    "width", "word_dim", "heads", "feed_forward", "channels", "token_dim", "sim_dim", "caption_width", "caption_word_dim",
)  # fmt: skip
LEAST = dict.fromkeys(FROM_ONE, 1) | {name: least for names, _, least in NUMBERS for name in names}


@dataclass(frozen=True)
class Sizes:
    """Numbers of a dataset that decide the cost of a run."""

    images: int
    captions: int
    dev_images: int
    dev_captions: int
    test_images: int
    test_captions: int
    regions: int
    image_dim: int
    vocabulary: int
    assumed: bool = False


# As distributed with SCAN, and for Flickr8k as book/datasets.md describes it; used where the data itself is not there.
PUBLISHED = {
    "flickr8k": Sizes(6_000, 30_000, 1_000, 5_000, 1_000, 5_000, REGIONS, 128, 3_178, assumed=True),
    "f30k": Sizes(29_000, 145_000, 1_014, 5_070, 1_000, 5_000, REGIONS, 2048, 8_481, assumed=True),
    "coco": Sizes(113_287, 566_435, 1_000, 5_000, 5_000, 25_000, REGIONS, 2048, 11_353, assumed=True),
}


def plan(
    root: Path,
    names: list[str],
    table: str,
    seeds: str,
    pairs: list[str],
    search: list[str],
    grid: list[str] | None = None,
) -> list[Job]:
    """The runs that a command asks for."""
    if bool(names) == bool(table):
        raise ItmError("itm run: give recipes, or --table, and not both")
    seeded = seeds or any(pair.partition("=")[0] == "seed" for pair in pairs)
    if grid and (search or seeded):  # a setting of a grid has its own seed
        raise ItmError("itm run: give --grid without --search and --seeds")
    if search and seeded:
        raise ItmError(f"itm run: give --search without a seed: what is tried has seed {SEARCH_SEED}")
    recipes = recipes_of_table(root, table) if table else [read_recipe(root, find_recipe(root, n)) for n in names]
    jobs: list[Job] = []
    for recipe in recipes:
        overrides = read_overrides(recipe, pairs)
        if "run_dir" in overrides and len(recipes) > 1:  # two recipes in one folder would resume each other
            overrides["run_dir"] = f"{overrides['run_dir']}/{recipe.name}"
        if search:
            jobs += search_jobs(recipe, read_choices(recipe, search), overrides)
        elif grid:
            jobs += grid_jobs(recipe, read_choices(recipe, grid, "--grid"), overrides)
        else:
            asked = seeds or ("" if "seed" in overrides else recipe.seeds)
            jobs += make_jobs(recipe, read_seeds(asked) if asked else None, overrides)
    for job in jobs:
        check_numbers(job)
    return jobs


def check_numbers(job: Job) -> None:
    """No number of a run is less than makes sense; one of another training (``inter_epochs``) is as one of the main."""
    for name, value in job.parameters.items():
        plain = re.sub("^(first|host|inter)_", "", name)
        whole = job.recipe.declared[name][0] == "int"
        if (whole or plain in LEAST) and not LEAST.get(plain, 0) <= value < math.inf:
            raise input_error(f"{job.recipe.name}, {name}", repr(value), f"a number from {LEAST.get(plain, 0):g} up")
    if not 0 < (part := job.parameters.get("train_fraction", 1)) <= 1:
        raise input_error(f"{job.recipe.name}, train_fraction", repr(part), "a number above 0, at most 1")


def read_choices(recipe: Any, search: list[str], option: str = "--search") -> dict[str, list[Any]]:
    """``["width=32,64"]`` as name → values."""
    choices = {}
    for pair in search:
        name, equals, values = pair.partition("=")
        if not equals or not values:
            raise input_error(option, repr(pair), "name=a,b,c")
        read_overrides(recipe, [f"{name}={value}" for value in values.split(",")][:1])
        if name in ASIDE:  # runs are not named after it: all would have one name, in one folder
            raise input_error(option, f"the parameter {name}", "a setting of the model or of its training")
        if name in choices:
            raise input_error(option, f"{name} twice", f"{name} once, with all its values: {name}=a,b,c")
        choices[name] = [read_value(recipe.declared[name][0], name, value) for value in values.split(",")]
    return choices


def described(jobs: list[Job], gpu: str, results: Path, measure: bool = False) -> Iterator[str]:
    """The plan in lines: for photographs from counted arithmetic, for the little world from earlier receipts.

    measure: time a few training steps of each on this machine, rather than assume how fast the GPU is.
    """
    if gpu not in GPUS:
        raise input_error("--gpu", repr(gpu), f"one of {', '.join(GPUS)}")
    seconds, costs = 0.0, {}  # seeds of a recipe cost the same: counted once
    for job in jobs:
        if job.parameters["dataset"] == "scenes":
            known = seconds_of(job, results)
            seconds += known or 0
            yield f"{job.label}: " + (f"about {known:.0f} s of training on a CPU" if known else "never run before")
        else:
            settings = json.dumps({k: v for k, v in job.parameters.items() if k not in ("seed", "run_dir")})
            if settings not in costs:
                costs[settings] = cost(job, gpu, measure)
            yield f"{job.label}: {costs[settings]}"
    if seconds:
        yield f"in all about {seconds / 60:.0f} min of training, by the receipts of earlier runs; two side by side halve it"
    yield f"{len(jobs)} runs planned, none started"


def seconds_of(job: Job, results: Path) -> float | None:
    """What this arm, or else any run of its chapter, took before."""
    same = "".join(c if c.isalnum() else "?" for c in job.parameters["variant"])
    for pattern in (f"{same}_scenes_s*.json", "*_scenes_s*.json"):
        for path in sorted((results / job.recipe.chapter).glob(pattern)):
            return read_receipt(path)["run"]["seconds"]
    return None


def cost(job: Job, gpu: str, measure: bool = False) -> str:
    """Arithmetic, memory, disk and hours of a run."""
    sizes, (peak, memory) = sizes_of(job), GPUS[gpu]
    parts = [counted(training, sizes, tokens_of(job)) for training in trainings(job, sizes)]
    speeds = [peak * 1e12 * USED] * len(parts)
    if measure:
        speeds = [measured(job, number, sizes, part.step) for number, part in enumerate(parts)]
    states = states_operations(job, sizes)
    total, held = states + sum(part.total for part in parts), max(part.held for part in parts)
    seconds = states / max(speeds) + sum(part.total / speed for part, speed in zip(parts, speeds, strict=True))
    said = f"{sum(part.steps for part in parts):,} steps, {total:.1e} operations in matrix products, "
    fits = "" if measure or held < memory * 2**30 else f", more than the {memory} GiB of it"
    said += f"about {held / 2**30:.1f} GiB{fits}, at most {disk(job, sizes, parts) / 1e9:.1f} GB on disk, "
    source = "sizes as published" if sizes.assumed else "sizes of the data"
    if measure:
        reached = " and ".join(f"{speed / 1e12:.2g}" for speed in speeds)
        said += f"about {duration(seconds)} on {device_name()}: timed steps reach {reached} · 10^12 operations a second"
        return f"{said} ({source})"
    return (
        f"{said}at least {duration(seconds)} on one {gpu} if they reach {USED:.0%} of its peak ({source}; reading data "
        "and small operations come on top; the share of the peak is a guess, --measure times steps instead)"
    )


def duration(seconds: float) -> str:
    """In hours, or in minutes if it is less than one."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{max(1, round(seconds / 60))} min"


def sizes_of(job: Job) -> Sizes:
    """From the data if it is there, else from what is published about a dataset of that name."""
    folder, part = job.data, job.parameters.get("train_fraction", 1.0)
    if folder.is_dir():
        train, *others = open_splits(folder, job.parameters["evaluate_on"])
        numbers = [number for split in (train, *others) for number in (split.n_images, split.n_captions)]
        regions = train.features.shape[1] if len(train.features.shape) == 3 else 1
        sizes = Sizes(*numbers, regions, train.feature_dim, len(Vocabulary.of_folder(folder)))
    else:
        name = next((name for name in PUBLISHED if re.search(name, folder.name)), None)
        if name is None:
            names = " or ".join(PUBLISHED)
            raise input_error(folder, "no such folder", f"data, or a name with {names} in it for an estimate")
        sizes = PUBLISHED[name]
    return replace(sizes, images=round(part * sizes.images), captions=round(part * sizes.captions))


def make_batch(pairs: int, sizes: Sizes, token_dim: int, device: str = "meta") -> PairBatch:
    """Pairs with offline ones beside them. To count only shapes are needed: "meta" has no numbers.

    token_dim: width of cached token states; 0 for words.
    """
    with torch.device(device):
        ids = torch.arange(pairs)
        images = ImageBatch(
            regions=torch.rand(pairs, sizes.regions, sizes.image_dim),
            mask=torch.ones(pairs, sizes.regions, dtype=torch.bool),
            boxes=torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(pairs, sizes.regions, 4),
            sizes=torch.ones(pairs, 2),
            ids=ids,
        )
        texts = TextBatch(
            lengths=torch.full((pairs,), WORDS),
            ids=ids,
            words=None if token_dim else torch.ones(pairs, WORDS, dtype=torch.long),
            features=torch.rand(pairs, WORDS, token_dim) if token_dim else None,
        )
    batch = PairBatch(images=images, texts=texts)
    return replace(batch, offline=OfflineNegatives(batch, batch))


def module_of(job: Job) -> ModuleType:
    """The generated module of a job's chapter: ``08_mmca`` exports ``mmca``."""
    return importlib.import_module("itm_utils.models." + job.recipe.chapter.partition("_")[2])


class Training(NamedTuple):
    """One training of a run. judged: what is validated while it lasts. mines: whether lists are made with it after.

    validate_every: steps between two looks at dev; 0 for one an epoch.
    """

    matcher: Matcher
    objective: Objective
    epochs: int
    batch_size: int
    judged: Matcher
    mines: bool = False
    validate_every: int = 0

    def looks(self, captions: int) -> int:
        """How often dev is judged: at every so many steps, and at the last."""
        an_epoch = captions // self.batch_size
        return math.ceil(self.epochs * an_epoch / (self.validate_every or max(1, an_epoch)))


def trainings(job: Job, sizes: Sizes, device: str = "meta") -> list[Training]:
    """What a run trains, one after the other: its model, or what the chapter's ``stages_of`` names."""
    module, given, every = module_of(job), job.parameters, job.parameters.get("validate_every", 0)
    with torch.device(device):  # a stage may build a model of its own
        model = module.build(given, sizes.vocabulary, sizes.image_dim)
        if hasattr(module, "stages"):
            return [
                Training(
                    stage.model, stage.objective, stage.config.epochs, stage.config.batch_size,
                    judged=stage.validated, mines=stage.mines, validate_every=stage.config.validate_every,
                )
                for stage in module.stages(given, model)
            ]  # fmt: skip
        stages = module.stages_of(given, model) if hasattr(module, "stages_of") else []
    if not stages:
        return [Training(model, objective_of(job), given["epochs"], given["batch_size"], model, validate_every=every)]
    return [
        Training(
            stage.matcher, stage.objective, stage.epochs, stage.batch_size,
            judged=model if stage is stages[-1] and len(stages) > 1 else stage.matcher,
            mines=stage.name == "miner",
            validate_every=every,
        )
        for stage in stages
    ]  # fmt: skip


def objective_of(job: Job) -> Objective:
    """What a chapter with one training trains for."""
    given = job.parameters
    if getattr(module_of(job), "PICKS_FIRST", False):
        return HardNegativeTripletLoss(negatives=given["negatives"], budget=given["budget_mb"] * 2**20)
    weights = {name: given.get(name, 0) for name in ("ccr_weight", "ccs_weight")}
    return AttentionConstraintLoss(HingeTriplet(), **weights) if any(weights.values()) else HingeTriplet()


def tokens_of(job: Job) -> int:
    """Width of the token states that a run's captions come as; 0 if they come as words."""
    return 0 if job.parameters.get("text_backbone") == "gru" else job.parameters.get("token_dim", 0)


class Rates(NamedTuple):
    """Operations of encoding one image and one caption and of scoring one pair, and whether a pair has two scores.

    image_bytes: of an encoded image. pair_bytes: of working memory for a pair, as the model itself estimates.
    """

    image: float
    caption: float
    pair: float
    decoupled: bool
    image_bytes: float
    pair_bytes: int

    def held(self, images: int, captions: int) -> float:
        """Bytes while a split is judged: all its encoded images, and a block of pairs within the budget."""
        block = min(images, BATCH) * min(captions, BATCH) * self.pair_bytes
        return images * self.image_bytes + min(block, BUDGET)

    def every_pair(self, images: int, captions: int) -> float:
        """Of so many images and captions, each encoded once."""
        return self.image * images + self.caption * captions + self.pair * images * captions


class Counted(NamedTuple):
    """One training in numbers. step: operations of a step. total: of all it asks for. held, weights: bytes."""

    training: Training
    rates: Rates
    steps: int
    step: float
    total: float
    held: float
    weights: int


def counted(training: Training, sizes: Sizes, tokens: int) -> Counted:
    """Steps, looks at dev, mining over the training set, and the scores of the test set."""
    step, held, weights = count_step(training, sizes, tokens)
    rates, steps = (
        count_rates(training.judged, sizes, tokens),
        training.epochs * (sizes.captions // training.batch_size),
    )
    looks = training.looks(sizes.captions) * rates.every_pair(sizes.dev_images, sizes.dev_captions)
    total = steps * step + looks + rates.every_pair(sizes.test_images, sizes.test_captions)
    if training.mines:
        total += rates.every_pair(sizes.images, sizes.captions)
    # Gradients and Adam's averages stay while a split is judged, what backward needs is gone.
    judged = 3 * weights + bytes_of_weights(training.judged)
    splits = ((sizes.dev_images, sizes.dev_captions), (sizes.test_images, sizes.test_captions))
    held = max(held, *(judged + rates.held(*split) for split in splits))
    return Counted(training, rates, steps, step, total, held, weights)


def bytes_of_weights(model: Matcher) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def bytes_of(encoded: Encoded) -> int:
    tensors = (encoded.local, encoded.mask, encoded.pooled, *encoded.extra.values(), *encoded.extra_local.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def count_step(training: Training, sizes: Sizes, tokens: int) -> tuple[float, float, int]:
    """Operations of one training step, the bytes it holds, and those of the weights.

    Held are weights, their gradients, Adam's two averages, what backward needs, and the block in which pairs are picked.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    batch = make_batch(training.batch_size, sizes, tokens)
    # Objectives log numbers; a tensor of shapes alone has none to give.
    unread = patch.multiple(Tensor, __float__=lambda _: 0.0, tolist=lambda tensor: [0.0] * len(tensor))
    with unread, FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss, _ = training.objective(training.matcher.train(), batch)
        loss.backward()
    weights = bytes_of_weights(training.matcher)
    block = getattr(training.objective, "budget", 0)
    return counter.get_total_flops(), 4 * weights + sum(kept.values()) + block, weights


def count_rates(model: Matcher, sizes: Sizes, tokens: int, block: int = 32) -> Rates:
    """What a model multiplies while it is judged, from a block of images and captions."""
    batch, counts = make_batch(block, sizes, tokens), []

    def count(call: Callable[..., Any], *given: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = call(*given)
        counts.append(counter.get_total_flops())
        return result

    with torch.no_grad():
        model.eval()
        images, texts = count(model.encode_images, batch.images), count(model.encode_texts, batch.texts)
        scores = count(model.score, images, texts)
    memory = bytes_of(images) / block, model.bytes_per_pair(images, texts)
    return Rates(counts[0] / block, counts[1] / block, counts[2] / block**2, scores.decoupled, *memory)


def states_operations(job: Job, sizes: Sizes) -> float:
    """Operations of the frozen text encoder, BERT base by assumption: each caption once, then they are cached."""
    return BERT_TOKEN * WORDS * all_captions(sizes) if tokens_of(job) else 0.0


def all_captions(sizes: Sizes) -> int:
    return sizes.captions + sizes.dev_captions + sizes.test_captions


def disk(job: Job, sizes: Sizes, parts: list[Counted]) -> float:
    """Bytes that a run leaves behind at most, besides the data: checkpoints, scores, mined lists, cached token states.

    A checkpoint is weights, Adam's two averages and the best weights so far; beside them lie the best alone. A stage
    that runs share is counted for each.
    """
    checkpoints = sum(part.weights for part in parts) * (4 * KEPT + 1)
    scores = 4 * (1 + parts[-1].rates.decoupled) * sizes.test_images * sizes.test_captions
    states = 2 * tokens_of(job) * WORDS * all_captions(sizes)
    entries = 0
    if any(part.training.mines for part in parts):
        mined = job.parameters["captions_mined"]
        entries = mined * sizes.images + mined // 5 * sizes.captions
    return checkpoints + scores + states + (4 + 8) * entries  # whole numbers of the lists, keys of the note until then


def device_here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the processor of this machine"


def measured(job: Job, number: int, sizes: Sizes, operations: float) -> float:
    """Operations a second that the steps of a run's training of this number reach here, with made-up numbers."""
    device, given = device_here(), job.parameters
    training = trainings(job, sizes, device)[number]
    batch = make_batch(training.batch_size, sizes, tokens_of(job), device)
    half = torch.autocast(device, torch.bfloat16, enabled=given["precision"] == "bf16")
    optimizer, taken = torch.optim.Adam(training.matcher.train().parameters()), []
    with compiled_scores(training.matcher, given.get("compiled", False)):
        for _ in range(2 + TIMED):
            began = time.perf_counter()
            with half:
                loss, _ = training.objective(training.matcher, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()  # a GPU is done only when it says so
            taken.append(time.perf_counter() - began)
    return operations / statistics.median(taken[2:])

"""What a command of ``itm run`` would do, and what it would cost."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from itm_book.recipes import find_recipe, read_overrides, read_recipe, read_seeds, read_value, recipes_of_table
from itm_book.run import Job, grid_jobs, make_jobs, search_jobs
from itm_utils.errors import ItmError, problem
from itm_utils.matcher import ImageBatch, Images, Matcher, PairBatch, TextBatch, Texts
from itm_utils.models.mmca import PickedTriplet
from itm_utils.models.vsepp import hinge_loss
from itm_utils.precomp import open_split
from itm_utils.receipts import read_receipt
from itm_utils.text import Vocabulary

# Peak single-precision arithmetic in 10^12 operations a second, and memory in GiB, as the makers state them.
GPUS = {"RTX 3090": (35.6, 24), "RTX 4090": (82.6, 24), "V100": (15.7, 16), "A100": (19.5, 40), "H100": (67.0, 80)}
USED = 0.25  # part of the peak that such models reach; a guess, and the plan says so
WORDS = 14  # of an average caption with its start and end symbol, where the data is not there to count
REGIONS = 36


@dataclass(frozen=True)
class Sizes:
    """Numbers of a dataset that decide the cost of a run."""

    captions: int
    test_images: int
    test_captions: int
    regions: int
    image_dim: int
    vocabulary: int
    assumed: bool = False


# As distributed with SCAN, and for Flickr8k as book/datasets.md describes it; used where the data itself is not there.
PUBLISHED = {
    "flickr8k": Sizes(30_000, 1_000, 5_000, REGIONS, 128, 3_178, assumed=True),
    "f30k": Sizes(145_000, 1_000, 5_000, REGIONS, 2048, 8_481, assumed=True),
    "coco": Sizes(566_435, 5_000, 25_000, REGIONS, 2048, 11_353, assumed=True),
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
    if grid and (search or seeds):  # a setting of a grid has its own seed
        raise ItmError("itm run: give --grid without --search and --seeds")
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
    return jobs


def read_choices(recipe: Any, search: list[str], option: str = "--search") -> dict[str, list[Any]]:
    """``["width=32,64"]`` as name → values."""
    choices = {}
    for pair in search:
        name, equals, values = pair.partition("=")
        if not equals or not values:
            raise problem(option, repr(pair), "name=a,b,c")
        read_overrides(recipe, [f"{name}={value}" for value in values.split(",")][:1])
        choices[name] = [read_value(recipe.declared[name][0], name, value) for value in values.split(",")]
    return choices


def described(jobs: list[Job], gpu: str, results: Path) -> Iterator[str]:
    """The plan in lines: for a GPU from counted arithmetic, for the little world from earlier receipts."""
    if gpu not in GPUS:
        raise problem("--gpu", repr(gpu), f"one of {', '.join(GPUS)}")
    seconds, costs = 0.0, {}  # seeds of a recipe cost the same: counted once
    for job in jobs:
        if job.parameters["dataset"] == "scenes":
            known = seconds_of(job, results)
            seconds += known or 0
            yield f"{job.label}: " + (f"about {known:.0f} s of training on a CPU" if known else "never run before")
        else:
            settings = json.dumps({k: v for k, v in job.parameters.items() if k not in ("seed", "run_dir")})
            if settings not in costs:
                costs[settings] = cost(job, gpu)
            yield f"{job.label}: {costs[settings]}"
    if seconds:
        yield f"in all about {seconds / 60:.0f} min of training, by the receipts of earlier runs; two side by side halve it"
    yield f"{len(jobs)} runs planned, none started"


def seconds_of(job: Job, results: Path) -> float | None:
    """What this arm, or else any run of its chapter, took before."""
    same = "".join(c if c.isalnum() else "?" for c in job.parameters["arm"])
    for pattern in (f"{same}_scenes_s*.json", "*_scenes_s*.json"):
        for path in sorted((results / job.recipe.chapter).glob(pattern)):
            return read_receipt(path)["run"]["seconds"]
    return None


def cost(job: Job, gpu: str) -> str:
    """Arithmetic, memory and hours of a run."""
    sizes = sizes_of(job.data)
    peak, memory = GPUS[gpu]
    steps, total, held = 0, count_pairs(job, sizes) * sizes.test_images * sizes.test_captions, 0.0
    for training in trainings(job, sizes):
        operations, needed = count_step(training, sizes, tokens_of(job))
        count = training.epochs * (sizes.captions // training.batch_size)
        steps, total, held = steps + count, total + count * operations, max(held, needed)
    hours = total / (peak * 1e12 * USED) / 3600
    took = f"{hours:.1f} h" if hours >= 1 else f"{max(1, round(60 * hours))} min"
    fits = "" if held < memory * 2**30 else f", more than the {memory} GiB of it"
    source = "sizes as published" if sizes.assumed else "sizes of the data"
    return (
        f"{steps:,} steps, {total:.1e} operations in matrix products, about {held / 2**30:.1f} GiB{fits}, "
        f"at least {took} on one {gpu} if they reach {USED:.0%} of its peak ({source}; reading data, validation "
        "and small operations come on top; an estimate, not a measurement)"
    )


def sizes_of(folder: Path) -> Sizes:
    """From the data if it is there, else from what is published about a dataset of that name."""
    if folder.is_dir():
        train, test = open_split(folder, "train"), open_split(folder, "test")
        regions = train.features.shape[1] if len(train.features.shape) == 3 else 1
        words = len(Vocabulary.of_folder(folder))
        return Sizes(train.n_captions, test.n_images, test.n_captions, regions, train.feature_dim, words)
    name = next((name for name in PUBLISHED if re.search(name, folder.name)), None)
    if name is None:
        raise problem(folder, "no such folder", f"data, or a name with {' or '.join(PUBLISHED)} in it for an estimate")
    return PUBLISHED[name]


def empty_batch(pairs: int, sizes: Sizes, token_dim: int) -> PairBatch:
    """A batch without numbers: only shapes are needed to count. token_dim: width of cached token states; 0 for words."""
    with torch.device("meta"):
        ids = torch.arange(pairs)
        images = ImageBatch(
            regions=torch.empty(pairs, sizes.regions, sizes.image_dim),
            mask=torch.ones(pairs, sizes.regions, dtype=torch.bool),
            boxes=torch.empty(pairs, sizes.regions, 4),
            sizes=torch.ones(pairs, 2),
            ids=ids,
        )
        texts = TextBatch(lengths=torch.full((pairs,), WORDS), ids=ids)
        if token_dim:
            texts = replace(texts, features=torch.empty(pairs, WORDS, token_dim))
        else:
            texts = replace(texts, words=torch.ones(pairs, WORDS, dtype=torch.long))
    return PairBatch(images=images, texts=texts)


def module_of(job: Job) -> ModuleType:
    """The generated module of a job's chapter: ``08_mmca`` exports ``mmca``."""
    return importlib.import_module("itm_utils.models." + job.recipe.chapter.partition("_")[2])


def empty_model(job: Job, sizes: Sizes) -> Matcher:
    with torch.device("meta"):
        return module_of(job).build(job.parameters, sizes.vocabulary, sizes.image_dim)


class Training(NamedTuple):
    """One training of a run. picked: all pairs are scored without gradients, and few with."""

    model: Matcher
    epochs: int
    batch_size: int
    picked: bool


def trainings(job: Job, sizes: Sizes) -> list[Training]:
    """What a run trains, one after the other: its model, or what the chapter's ``stages_of`` names."""
    module, model, given = module_of(job), empty_model(job, sizes), job.parameters
    if not hasattr(module, "stages_of"):
        return [Training(model, given["epochs"], given["batch_size"], getattr(module, "PICKS_FIRST", False))]
    with torch.device("meta"):  # a stage may build a model of its own
        stages = module.stages_of(given, model)
    return [
        Training(stage.matcher, stage.epochs, stage.batch_size, isinstance(stage.objective, PickedTriplet))
        for stage in stages
    ]


def tokens_of(job: Job) -> int:
    """Width of the token states that a run's captions come as; 0 if they come as words."""
    return 0 if job.parameters.get("reader") == "gru" else job.parameters.get("token_dim", 0)


def learned_scores(model: Matcher, images: Images, texts: Texts, picked: bool) -> Tensor:
    """What a step asks of a model: all pairs with gradients; or all without, and three a caption with."""
    if not picked:
        return hinge_loss(model.score(images, texts), 0.2, True)
    with torch.no_grad():
        model.score(images, texts)
    chosen = torch.arange(len(texts), device="meta").repeat(3)
    return model.score_pairs(images[chosen], texts[chosen]).i2t.sum()


def count_step(training: Training, sizes: Sizes, tokens: int) -> tuple[float, float]:
    """Operations of one training step, and the bytes it holds: weights, Adam's two averages, what backward needs."""
    model, held = training.model, {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    batch = empty_batch(training.batch_size, sizes, tokens)
    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        images, texts = model.encode_images(batch.images), model.encode_texts(batch.texts)
        loss = learned_scores(model, images, texts, training.picked)
        (loss + sum(model.extra_losses(images, texts, batch).values())).backward()
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return counter.get_total_flops(), 4 * weights + sum(held.values())


def count_pairs(job: Job, sizes: Sizes, block: int = 32) -> float:
    """Operations of scoring one image with one caption."""
    model, batch = empty_model(job, sizes).eval(), empty_batch(block, sizes, tokens_of(job))
    with torch.no_grad():
        images, texts = model.encode_images(batch.images), model.encode_texts(batch.texts)
        with FlopCounterMode(display=False) as counter:
            model.score(images, texts)
    return counter.get_total_flops() / block**2

"""What a run would cost: the real training step of its chapter, counted on a few pairs and scaled to its batches.

A chapter's ``build`` and ``stages`` say what is trained and by which objective; nothing is described a second time. The
step runs on the CPU, on real tensors, in the widths of the experiment, for two small numbers of pairs b.
:class:`OperationCounter` counts its operations. What is counted is done once per image or caption, or once per pair of
the batch, so it is l·b + q·b²: two counts determine l and q, and with them the step of the real batch size. (What is done
once per step, as SGR multiplies two weights, is far below a thousandth.) The bytes
that backward needs scale the same way. Encoding and scoring of a split are counted per image, per caption and per pair.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from itm_lab.experiments.chain import shared_folder
from itm_lab.experiments.kept_counts import keep_count, read_count
from itm_lab.experiments.runner import Job, known_receipt, open_data
from itm_lab.experiments.shapes import WithoutDraws
from itm_utils.cache import cache_root
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import input_error
from itm_utils.matcher import Encoded, ImageBatch, Matcher, OfflineNegatives, PairBatch, TextBatch
from itm_utils.scoring import BATCH, BUDGET
from itm_utils.training import Stage
from itm_utils.training.loop import KEPT, compiled_scores

# Peak single-precision arithmetic in 10^12 operations per second, and memory in GiB, as the makers state them.
GPUS = {"RTX 3090": (35.6, 24), "RTX 4090": (82.6, 24), "V100": (15.7, 16), "A100": (19.5, 40), "H100": (67.0, 80)}
USED = 0.25  # part of the peak that such models reach; a guess, and the plan says so: --measure replaces it
CAPTION_WORDS = 14  # of an average caption with its start and end symbol, where the data is not there to count
REGIONS = 36
BERT_TOKEN = 12 * 24 * 768**2  # operations of BERT base per token: 12 layers of 12 d^2 weights, two for each
TIMED, WARM_UP = 5, 2  # training steps of which --measure takes the median, and steps before them
FEW = 3  # pairs of a counted step, besides the random negatives that its objective draws per pair
LARGE = 2**20  # numbers of a weight from which on it and its gradient stay without values
READ_BY_ENCODER = ("evaluate_on", "text_encoder", "text_layers", "max_tokens", "public_padding")
BLOCK = 4  # images and captions of a counted block of scores


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
    "flickr8k": Sizes(6_000, 30_000, 1_000, 5_000, 1_000, 5_000, 48, 512, 3_178, assumed=True),
    "f30k": Sizes(29_000, 145_000, 1_000, 5_000, 1_000, 5_000, REGIONS, 2048, 8_481, assumed=True),
    "coco": Sizes(113_287, 566_435, 1_000, 5_000, 5_000, 25_000, REGIONS, 2048, 11_353, assumed=True),
}


class RunCost(NamedTuple):
    """What a run costs. operations: in matrix products. held: bytes on the GPU.

    seconds, written: of each training or folder, so that what runs share is added up once: folder → seconds or bytes.
    speeds: operations a second of each stage as its timed steps reached them; empty where they are guessed.
    """

    steps: int
    operations: float
    held: float
    seconds: dict[str, float]
    written: dict[str, float]
    speeds: tuple[float, ...]
    assumed: bool

    def on(self, gpu: str) -> str:
        """In a line. gpu: the one that the plan is for."""
        memory, time_taken = GPUS[gpu][1], duration(sum(self.seconds.values()))
        fits = "" if self.speeds or self.held < memory * 2**30 else f", more than the {memory} GiB of it"
        said = f"{self.steps:,} steps, {self.operations:.1e} operations in matrix products, "
        said += f"about {self.held / 2**30:.1f} GiB{fits}, at most {sum(self.written.values()) / 1e9:.1f} GB on disk, "
        source = "sizes as published" if self.assumed else "sizes of the data"
        if self.speeds:
            reached = " and ".join(f"{speed / 1e12:.2g}" for speed in self.speeds)
            said += f"about {time_taken} on {device_name()}: timed steps reach {reached} · 10^12 operations a second"
            return f"{said} ({source})"
        return (
            f"{said}at least {time_taken} on one {gpu} if they reach {USED:.0%} of its peak ({source}; reading data and "
            "small operations come on top; the share of the peak is a guess, --measure times steps instead)"
        )


class Costs:
    """The costs of runs on photographs, counted when they are first asked for: seeds of an experiment cost the same.

    measure: time a few training steps of each on this machine, rather than assume how fast the GPU is.
    """

    def __init__(self, gpu: str, measure: bool = False) -> None:
        if gpu not in GPUS:
            raise input_error("--gpu", repr(gpu), f"one of {', '.join(GPUS)}")
        self.gpu, self.measure = gpu, measure
        self.counted: dict[tuple[Any, ...], tuple[Sizes, list[StageCost], tuple[float, ...]]] = {}

    def of(self, job: Job) -> RunCost:
        settings = cost_key(job)
        if settings not in self.counted:
            sizes = sizes_of(job)
            parts = stage_costs(job, sizes)
            steps = [part.step for part in parts] if self.measure else []
            speeds = tuple(measured(job, number, sizes, step) for number, step in enumerate(steps))
            self.counted[settings] = sizes, parts, speeds
        return run_cost(job, *self.counted[settings], GPUS[self.gpu][0] * 1e12 * USED)

    def together(self, jobs: Iterable[Job]) -> tuple[float, float]:
        """Seconds and bytes of several runs: what they share is trained, mined and kept once."""
        seconds: dict[str, float] = {}
        written: dict[str, float] = {}
        for job in jobs:
            found = self.of(job)
            seconds, written = seconds | found.seconds, written | found.written
        return sum(seconds.values()), sum(written.values())


def cost_key(job: Job) -> tuple[Any, ...]:
    """Equal for two runs that cost the same: of a number with a fraction only whether it is 0 counts, but for the data."""
    given = {name: value for name, value in job.parameters.items() if name not in ("seed", "run_dir", "variant")}
    return job.experiment.chapter, job.parameters.get("train_fraction"), described_by(given)


def run_cost(job: Job, sizes: Sizes, parts: list[StageCost], speeds: tuple[float, ...], guessed: float) -> RunCost:
    """From what was counted. guessed: operations a second where no step was timed."""
    states, reached = states_operations(job, sizes), speeds or (guessed,) * len(parts)
    seconds = {stage_folder(job, part.stage): part.total / speed for part, speed in zip(parts, reached, strict=True)}
    if states:
        seconds[states_folder(job)] = states / max(reached)
    return RunCost(
        steps=sum(part.steps for part in parts),
        operations=states + sum(part.total for part in parts),
        held=max(part.held for part in parts),
        seconds=seconds,
        written=written(job, sizes, [(part.stage, part.weights) for part in parts], parts[-1].rates.decoupled),
        speeds=speeds,
        assumed=sizes.assumed,
    )


def described(jobs: list[Job], costs: Costs, results: Path) -> Iterator[str]:
    """The plan in lines: for photographs from counted arithmetic, for Scenes from earlier receipts."""
    seconds, photographs = 0.0, [job for job in jobs if job.parameters["dataset"] != "scenes"]
    for job in jobs:
        if job.parameters["dataset"] == "scenes":
            known = seconds_of(job, results)
            seconds += known or 0
            yield f"{job.label}: " + (f"about {known:.0f} s of training on a CPU" if known else "never run before")
        else:
            yield f"{job.label}: {costs.of(job).on(costs.gpu)}"
    if seconds:
        yield f"in all about {seconds / 60:.0f} min of training, by the receipts of earlier runs; two side by side halve it"
    if len(photographs) > 1:
        time_taken, size = costs.together(photographs)
        yield f"in all {duration(time_taken)} and at most {size / 1e9:.1f} GB on disk; what runs share counts once"
    yield f"{len(jobs)} runs planned, none started"


def seconds_of(job: Job, results: Path) -> float | None:
    """What this variant, or else any run of its chapter, took before."""
    same = "".join(c if c.isalnum() else "?" for c in job.parameters["variant"])
    for pattern in (f"{same}_scenes_s*.json", "*_scenes_s*.json"):
        for path in sorted((results / job.experiment.chapter).glob(pattern)):
            return known_receipt(path)["run"]["seconds"]
    return None


def duration(seconds: float) -> str:
    """In hours, or in minutes if it is less than one."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{max(1, round(seconds / 60))} min"


def sizes_of(job: Job) -> Sizes:
    """From the data if it is there, else from what is published about a dataset of that name."""
    folder, part = job.data, job.parameters.get("train_fraction", 1.0)
    if folder.is_dir():
        train, dev, test = open_data(folder, job.parameters["evaluate_on"])
        sizes = Sizes(
            images=train.n_images, captions=train.n_captions, dev_images=dev.n_images, dev_captions=dev.n_captions,
            test_images=test.n_images, test_captions=test.n_captions,
            regions=train.features.shape[1] if len(train.features.shape) == 3 else 1,
            image_dim=train.feature_dim, vocabulary=len(Vocabulary.of_folder(folder)),
        )  # fmt: skip
    else:
        name = next((name for name in PUBLISHED if re.search(name, folder.name)), None)
        if name is None:
            names = " or ".join(PUBLISHED)
            raise input_error(folder, "no such folder", f"data, or a name with {names} in it for an estimate")
        sizes = PUBLISHED[name]
    return replace(sizes, images=round(part * sizes.images), captions=round(part * sizes.captions))


# The real step ------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What a batch looks like besides its number of pairs. token_dim: width of cached token states; 0 for words."""

    regions: int
    image_dim: int
    vocabulary: int
    token_dim: int


def shape_of(job: Job, sizes: Sizes) -> Shape:
    return Shape(sizes.regions, sizes.image_dim, sizes.vocabulary, tokens_of(job))


def tokens_of(job: Job) -> int:
    """Width of the token states that a run's captions come as; 0 if they come as words."""
    return 0 if job.parameters.get("text_backbone") == "gru" else job.parameters.get("token_dim", 0)


def make_batch(pairs: int, shape: Shape, device: str = "cpu") -> PairBatch:
    """Pairs with offline negatives beside them, of made-up numbers; lengths stay on the CPU, as those of a loader."""
    ids = torch.arange(pairs)
    images = ImageBatch(
        regions=torch.rand(pairs, shape.regions, shape.image_dim),
        mask=torch.ones(pairs, shape.regions, dtype=torch.bool),
        boxes=torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(pairs, shape.regions, 4),
        sizes=torch.ones(pairs, 2),
        ids=ids,
    )
    lengths = torch.full((pairs,), CAPTION_WORDS)
    if shape.token_dim:
        features = torch.rand(pairs, CAPTION_WORDS, shape.token_dim)
        ends = torch.arange(CAPTION_WORDS) % (CAPTION_WORDS - 1) == 0  # [CLS] and [SEP]
        special = ends.expand(pairs, CAPTION_WORDS)
        texts = TextBatch(lengths=lengths, ids=ids, features=features, special=special)
    else:
        texts = TextBatch(lengths=lengths, ids=ids, words=torch.ones(pairs, CAPTION_WORDS, dtype=torch.long))
    batch = PairBatch(images=images, texts=texts).to(device)
    return replace(batch, offline=OfflineNegatives(batch, batch))


def make_stages(job: Job, shape: Shape, device: str) -> list[Stage]:
    """The trainings of a run with the objective of their last epoch: a warm-up is counted as what comes after it."""
    stages = job.stages(shape.vocabulary, shape.image_dim, device)
    for stage in stages:
        if hasattr(stage.objective, "set_epoch"):
            stage.objective.set_epoch(stage.config.epochs - 1)
    return stages


class OperationCounter(WithoutDraws):
    """Counts the operations of matrix products by PyTorch's own formulas (``flop_registry``), and does not compute them.

    A product, like an initialisation, gives one number everywhere: which operations run, and on what shapes, is all that a
    count needs, and takes a hundredth of the time. weights: shapes of products that need no memory either, as gradients of
    large weights.
    """

    aten = torch.ops.aten
    MATRICES: ClassVar = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
    PRODUCTS: ClassVar = {2: flop_registry[aten.mm].__wrapped__, 3: flop_registry[aten.bmm].__wrapped__}

    def __init__(self, weights: Iterable[torch.Size] = ()) -> None:
        super().__init__()
        self.operations, self.weights = 0, {shape for one in weights for shape in (tuple(one), tuple(one)[::-1])}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operation = kwargs or {}, func._overloadpacket
        if operation in flop_registry:
            result = self.shaped(func, args, kwargs)
            if operation in self.MATRICES:  # their formula alone: what prepares other arguments for it takes longer
                left, right = args[-2:]
                self.operations += self.PRODUCTS[left.dim()](left.shape, right.shape)
            else:
                self.operations += flop_registry[operation](*args, **kwargs, out_val=result)
            return result
        if operation in self.DRAWS:
            few = not args[0].is_meta and args[0].numel() < 4 * LARGE
            return args[0].fill_(0.01) if few else args[0]
        if operation is self.aten.add and is_shared(args[0]) and args[0].shape in self.weights:
            return args[0]  # the sum of two gradients of one weight
        if operation is self.aten.mkldnn_rnn_layer:
            found = "an LSTM, which on the CPU is one operation without a formula"
            raise input_error("the model", found, "layers whose products can be counted", "Give it a GRU.")
        if torch.is_inference_mode_enabled():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def shaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a product returns, with one number everywhere."""
        if func._overloadpacket in self.MATRICES and not args[0].is_meta:
            left, right = args[-2:]
            shape = (*left.shape[:-1], right.shape[-1])
            one = torch.full((), 0.01, dtype=left.dtype)
            return one.expand(shape) if shape in self.weights else one.repeat(shape)
        shapes = func(*tree_map_only(Tensor, lambda x: x.to("meta"), args), **kwargs)
        return tree_map_only(Tensor, lambda x: torch.full(x.shape, 0.01, dtype=x.dtype), shapes)


@contextmanager
def counting(weights: Iterable[torch.Size] = ()) -> Iterator[OperationCounter]:
    """Count what runs inside; attention runs as matrix products there, not as one operation without a formula."""
    with sdpa_kernel(SDPBackend.MATH), OperationCounter(weights) as counter:
        yield counter


def is_shared(tensor: Any) -> bool:
    """Whether all elements are one number in memory."""
    return isinstance(tensor, Tensor) and tensor.dim() > 0 and not any(tensor.stride())


class StepCount(NamedTuple):
    """Of one training step. operations: in matrix products. held: bytes that backward needs."""

    operations: float
    held: float


class Rates(NamedTuple):
    """Operations of encoding one image and one caption and of scoring one pair, and whether a pair has two scores.

    image_bytes: of an encoded image. pair_bytes: of working memory per pair, as the model itself estimates.
    """

    image: float
    caption: float
    pair: float
    decoupled: bool
    image_bytes: float
    pair_bytes: int

    def held(self, images: int, captions: int) -> float:
        """Bytes while a split is scored: all its encoded images, and a block of pairs within the budget."""
        block = min(images, BATCH) * min(captions, BATCH) * self.pair_bytes
        return images * self.image_bytes + min(block, BUDGET)

    def every_pair(self, images: int, captions: int) -> float:
        """Of so many images and captions, each encoded once."""
        return self.image * images + self.caption * captions + self.pair * images * captions


class StageCount(NamedTuple):
    """What was counted of a stage. steps: number of pairs → its step. weights, ranked_weights: bytes."""

    steps: dict[int, StepCount]
    rates: Rates
    weights: int
    ranked_weights: int

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> StageCount:
        """From what JSON made of one."""
        steps = {int(pairs): StepCount(*step) for pairs, step in kept["steps"].items()}
        return cls(steps, Rates(*kept["rates"]), kept["weights"], kept["ranked_weights"])


# What was counted in this process: stages and models of one key are counted once.
COUNTS: dict[tuple[Any, ...], StageCount] = {}
RATES: dict[tuple[Any, ...], Rates] = {}


def count_stages(job: Job, shape: Shape) -> list[tuple[Stage, StageCount]]:
    """The stages of a run with their counts. Models without numbers ("meta") tell whether a stage was counted before."""
    stages = make_stages(job, shape, "meta")
    keys = [(shape, *map(described_by, (one.model, one.objective, one.validated)), few_pairs(one)) for one in stages]
    for key in keys:
        if key not in COUNTS and (kept := read_count(key)) is not None:
            COUNTS[key] = StageCount.of(kept)
    if not all(key in COUNTS for key in keys):
        with counting():  # initialises quickly
            real = make_stages(job, shape, "cpu")
        for key, stage in zip(keys, real, strict=True):
            if key not in COUNTS:
                COUNTS[key] = count_stage(stage, shape)
                keep_count(key, COUNTS[key]._asdict())
    return [(stage, COUNTS[key]) for stage, key in zip(stages, keys, strict=True)]


def count_stage(stage: Stage, shape: Shape) -> StageCount:
    with torch.random.fork_rng(devices=[]):
        steps = {pairs: count_step(stage, make_batch(pairs, shape)) for pairs in few_pairs(stage)}
        if (key := (shape, described_by(stage.validated))) not in RATES:
            RATES[key] = count_rates(stage.validated, shape)
    return StageCount(steps, RATES[key], bytes_of_weights(stage.model), bytes_of_weights(stage.validated))


def described_by(thing: Any) -> Any:
    """A model or an objective as a key: classes and settings. Of a number with a fraction only whether it is 0 counts."""
    if isinstance(thing, float):
        return bool(thing)
    if thing is None or isinstance(thing, int | str):
        return thing
    if isinstance(thing, Matcher):
        return type(thing).__name__, described_by(thing.config)
    if isinstance(thing, Mapping):
        return tuple(sorted((str(name), repr(described_by(value))) for name, value in thing.items()))
    if isinstance(thing, list | tuple):
        return tuple(map(described_by, thing))
    return type(thing).__name__, described_by(getattr(thing, "__dict__", {})) or repr(thing)


def few_pairs(stage: Stage) -> tuple[int, ...]:
    """The numbers of pairs that are counted: a batch that is small itself, or two that stand for it."""
    few = FEW + getattr(stage.objective, "negatives", 0)
    return (stage.config.batch_size,) if stage.config.batch_size <= few + 1 else (few, few + 1)


def count_step(stage: Stage, batch: PairBatch) -> StepCount:
    """Operations of one training step forth and back, and the bytes that are kept between the two, weights aside."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    weights = list(stage.model.train().parameters())
    with counting(weight.shape for weight in weights if weight.numel() >= LARGE) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss, _ = stage.objective(stage.model, batch)
        torch.autograd.grad(loss, [weight for weight in weights if weight.requires_grad], allow_unused=True)
    for weight in weights:
        kept.pop(weight.untyped_storage()._cdata, None)
    return StepCount(counter.operations, sum(storage.nbytes() for storage in kept.values()))


def count_rates(model: Matcher, shape: Shape) -> Rates:
    """What a model multiplies while a split is scored, from blocks of a few images and captions.

    Scores of (i, c) cost a part per image, one per caption and one per pair. Three blocks tell them apart; a split is
    scored in blocks of ``BATCH`` by ``BATCH``, over whose pairs the first two are spread.
    """

    def count(call: Callable[..., Any], *given: Any) -> tuple[Any, int]:
        with counting() as counter:
            result = call(*given)
        return result, counter.operations

    with torch.no_grad():
        model.eval()
        few, more = make_batch(BLOCK, shape), make_batch(2 * BLOCK, shape)
        images, image = count(model.encode_images, few.images)
        texts, caption = count(model.encode_texts, few.texts)
        scores, block = count(model.score, images, texts)
        _, twice_images = count(model.score, count(model.encode_images, more.images)[0], texts)
        _, twice_captions = count(model.score, images, count(model.encode_texts, more.texts)[0])
    of_pairs = twice_images + twice_captions - 3 * block  # (2a + b + 2p) + (a + 2b + 2p) - 3 (a + b + p) = p
    of_items = block - of_pairs  # a + b
    pair = of_pairs / BLOCK**2 + of_items / BLOCK / BATCH
    memory = bytes_of(images) / BLOCK, model.bytes_per_pair(images, texts)
    return Rates(image / BLOCK, caption / BLOCK, pair, scores.decoupled, *memory)


def at_batch(counts: Mapping[int, float], pairs: int) -> float:
    """l·b + q·b² at b = pairs, from two counts; a count of that very batch is taken as it is."""
    if pairs in counts:
        return counts[pairs]
    (few, one), (more, other) = counts.items()
    q = (Fraction(other) / more - Fraction(one) / few) / (more - few)
    return float((Fraction(one) / few - q * few) * pairs + q * pairs**2)


def bytes_of_weights(model: Matcher) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def bytes_of(encoded: Encoded) -> int:
    tensors = (encoded.local, encoded.mask, encoded.pooled, *encoded.extra.values(), *encoded.extra_local.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


# From the step to the run -------------------------------------------------------------------------------------------


class StageCost(NamedTuple):
    """One training in numbers. step: operations of a step. total: of all it asks for. held, weights: bytes."""

    stage: Stage
    rates: Rates
    steps: int
    step: float
    total: float
    held: float
    weights: int


def stage_costs(job: Job, sizes: Sizes) -> list[StageCost]:
    """Each training of a run: its steps, its validations, what it mines, and the scores of the test set."""
    return [stage_cost(stage, count, sizes) for stage, count in count_stages(job, shape_of(job, sizes))]


def stage_cost(stage: Stage, count: StageCount, sizes: Sizes) -> StageCost:
    rates, pairs = count.rates, stage.config.batch_size
    per_epoch = sizes.captions // pairs
    steps = stage.config.epochs * per_epoch
    step = at_batch({few: one.operations for few, one in count.steps.items()}, pairs)
    validations = math.ceil(steps / (stage.config.validate_every or max(1, per_epoch)))
    total = steps * step + validations * rates.every_pair(sizes.dev_images, sizes.dev_captions)
    total += rates.every_pair(sizes.test_images, sizes.test_captions)
    if stage.mines:
        total += rates.every_pair(sizes.images, sizes.captions)
    # Weights, their gradients, Adam's two averages, what backward needs, and the block in which negatives are selected.
    kept = at_batch({few: one.held for few, one in count.steps.items()}, pairs)
    held = 4 * count.weights + kept + getattr(stage.objective, "budget", 0)
    # Gradients and Adam's averages stay while a split is scored, what backward needs is gone.
    scored = 3 * count.weights + count.ranked_weights
    splits = ((sizes.dev_images, sizes.dev_captions), (sizes.test_images, sizes.test_captions))
    held = max(held, *(scored + rates.held(*split) for split in splits))
    return StageCost(stage, rates, steps, step, total, held, count.weights)


def states_operations(job: Job, sizes: Sizes) -> float:
    """Operations of the frozen text encoder, BERT base by assumption: each caption once, then they are cached."""
    return BERT_TOKEN * CAPTION_WORDS * all_captions(sizes) if tokens_of(job) else 0.0


def all_captions(sizes: Sizes) -> int:
    return sizes.captions + sizes.dev_captions + sizes.test_captions


def written(job: Job, sizes: Sizes, weights: Iterable[tuple[Stage, int]], decoupled: bool) -> dict[str, float]:
    """Folder or file → bytes that a run leaves there at most: checkpoints, scores, mined lists, cached token states.

    A checkpoint is weights, Adam's two averages and the best weights so far; beside them lie the best alone.
    weights: bytes of each stage's. decoupled: whether every pair has two scores.
    """
    found = {str(job.folder / "scores.safetensors"): 4.0 * (1 + decoupled) * sizes.test_images * sizes.test_captions}
    for stage, size in weights:
        folder = stage_folder(job, stage)
        found[folder] = size * (4 * KEPT + 1)
        if stage.mines:
            mined = job.parameters["captions_mined"]
            entries = mined * sizes.images + mined // 5 * sizes.captions
            found[folder] += (4 + 8) * entries  # whole numbers of the lists, keys of the note until then
    if tokens_of(job):
        found[states_folder(job)] = 2 * tokens_of(job) * CAPTION_WORDS * all_captions(sizes)
    return found


def stage_folder(job: Job, stage: Stage) -> str:
    """Where a stage is trained: in a folder of its own, or in one that runs share."""
    return shared_folder(job, stage) or str(job.folder / stage.name)


def states_folder(job: Job) -> str:
    """A name in the cache for the token states of a run's captions: one for all runs that read the same."""
    read = (job.data.name, *(str(job.parameters.get(name, "")) for name in READ_BY_ENCODER))
    return str(cache_root() / "-".join(read).replace("/", "_"))


def device_here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the processor of this machine"


def measured(job: Job, number: int, sizes: Sizes, operations: float) -> float:
    """Operations per second that the steps of a run's stage of this number reach here, with made-up numbers."""
    device, shape = device_here(), shape_of(job, sizes)
    stage = make_stages(job, shape, device)[number]
    with compiled_scores(stage.model, stage.config.compiled):
        steps = timed_steps(stage, make_batch(stage.config.batch_size, shape, device))
    return operations / steps.median


class TimedSteps(NamedTuple):
    """Training steps of one stage. seconds: of each. loss: of the last, NaN if a gradient was not finite."""

    seconds: list[float]
    loss: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def timed_steps(stage: Stage, batch: PairBatch, steps: int = TIMED, warm_up: int = WARM_UP) -> TimedSteps:
    """Time steps as the training loop takes them: in the stage's precision, at its learning rate, clipped by its norm."""
    config, device, taken, loss, norm = stage.config, batch.images.regions.device, [], math.nan, math.nan
    trained = [weight for weight in stage.model.train().parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=config.learning_rate)
    half = torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
    for _ in range(warm_up + steps):
        began = time.perf_counter()
        with half:
            current, _ = stage.objective(stage.model, batch)
        optimizer.zero_grad()
        current.backward()
        norms = torch.nn.utils.clip_grad_norm_(trained, config.clip_norm or math.inf)
        optimizer.step()
        loss, norm = current.item(), norms.item()  # a GPU is done only when it says so
        taken.append(time.perf_counter() - began)
    return TimedSteps(taken[warm_up:], loss if math.isfinite(norm) else math.nan)

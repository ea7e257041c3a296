"""Ten minutes that accept a GPU: does it compute, train, resume and hurry as the book expects?

Nobody who writes the book has every GPU. What this finds is written as one JSON file that a reader can send back.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from itm_lab.data.opening import dataset_folder
from itm_lab.experiments.cost import Shape, make_batch, make_stages, shape_of, sizes_of, timed_steps
from itm_lab.experiments.plan import plan_one
from itm_lab.experiments.runner import Job
from itm_lab.parity.comparison import comparing_on
from itm_lab.parity.reference_cases import run_folder
from itm_lab.paths import Paths
from itm_lab.records.checkout import code_of
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError, input_error
from itm_utils.files import write_json
from itm_utils.matcher import Matcher, PairBatch
from itm_utils.models.scan import SCAN
from itm_utils.models.vsepp import HingeTriplet
from itm_utils.training import Stage, TrainConfig
from itm_utils.training.loop import train

FORMAT = "itm-doctor-2"
# One training of each model at the size of its paper.
EXPERIMENTS = (
    "vsepp/f30k/vsepp", "scan/f30k/t2i_avg", "bfan/f30k/equal", "pfan/f30k/t2i", "vsrn/f30k/first", "saem/f30k/full",
    "sgraf/f30k/saf", "sgraf/f30k/sgr", "mmca/f30k/full", "dcpa/f30k/two_stages", "aoq/f30k/bfan_adapoffquin",
    "ccr_ccs/f30k/scan_ccr_ccs",
)  # fmt: skip
HALF_PRECISION = 0.02  # largest difference of a score, as book/how-to-use.md promises
STEPS, WARM_UP = 5, 2  # timed steps, and steps before them
SAMPLED_EVERY = 0.01  # seconds between two readings of a processor's memory
RESUMED_STEPS, CHECKPOINT_EVERY = 40, 10
TRAIN = "import sys, pathlib, itm_lab.doctor.acceptance as a; a.train_small(pathlib.Path(sys.argv[1]), sys.argv[2])"
RESUME_TOLERANCE = 1e-3  # of weights on a GPU, whose sums have no fixed order; on a CPU they must be equal


@dataclass
class Finding:
    """One thing that was checked. numbers: what was measured."""

    name: str
    ok: bool
    found: str
    numbers: dict[str, Any] = field(default_factory=dict)


def accept(
    root: Path,
    device: str,
    golden: Path,
    experiments: Sequence[str] = EXPERIMENTS,
    overrides: Sequence[str] = (),
) -> Iterator[Finding]:
    """Every check, one by one, as it ends. A check that breaks off is a finding, and the next one follows.

    golden: folder of reference cases. overrides: name=value, over the settings of every experiment.
    """
    check_device(device)
    jobs = [plan_one(root, name, list(overrides)) for name in experiments]  # a typo shows before anything is computed
    yield attempted("reference cases", lambda: reference_cases(golden, device))
    yield attempted("kill and resume", lambda: kill_and_resume(device))
    for job in jobs:
        yield from steps_of(job, device)


def check_device(device: str) -> None:
    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available, "cpu": lambda: True}
    if device not in available:
        raise input_error("--device", repr(device), f"one of {', '.join(available)}")
    if not available[device]():
        raise input_error("--device", device, "a device this machine has", "PyTorch sees no GPU; see `itm doctor`.")


def attempted(name: str, check: Callable[[], Finding]) -> Finding:
    """What a check finds; if the device cannot do it, that is what it finds."""
    try:
        return check()
    except ItmError:
        raise
    except torch.OutOfMemoryError:
        return Finding(name, False, "does not fit into the memory of the device")
    except (RuntimeError, NotImplementedError) as error:  # what PyTorch raises where a device lacks an operation
        return Finding(name, False, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")


def reference_cases(golden: Path, device: str) -> Finding:
    """Scores, losses and gradients of the public implementations, computed on this device."""
    with comparing_on(device):
        rows = list(run_folder(golden))
    beyond = [f"{row.case} ({row.kind} {row.difference:.1e} at {row.worst})" for row in rows if not row.ok]
    worst = {kind: max(row.difference for row in rows if row.kind == kind) for kind in {row.kind for row in rows}}
    found = f"{len(rows) - len(beyond)} of {len(rows)} within the tolerances"
    return Finding("reference cases", not beyond, "; ".join([found, *beyond[:3]]), {"largest difference": worst})


def kill_and_resume(device: str) -> Finding:
    """A training that is killed and started again, against one that is not: the same weights in the end."""
    with tempfile.TemporaryDirectory() as temporary:
        whole, killed = Path(temporary) / "whole", Path(temporary) / "killed"
        train_small(whole, device)
        # A process of its own: to be killed like one that a cluster stops.
        with subprocess.Popen([sys.executable, "-c", TRAIN, str(killed), device]) as process:
            while process.poll() is None and not list(killed.glob("step-*.safetensors")):
                time.sleep(0.01)
            process.kill()
        interrupted = max((int(path.stem[5:]) for path in killed.glob("step-*.safetensors")), default=0)
        ours, theirs = train_small(killed, device), train_small(whole, device)
    difference = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    within = difference <= (0 if device == "cpu" else RESUME_TOLERANCE)
    ok = 0 < interrupted < RESUMED_STEPS and within  # else nothing was resumed
    found = f"killed after step {interrupted} of {RESUMED_STEPS}, weights then differ by at most {difference:.1e}"
    return Finding("kill and resume", ok, found, {"difference": difference, "killed after": interrupted})


def train_small(folder: Path, device: str) -> dict[str, Tensor]:
    """Train a small SCAN on Scenes, or go on from the checkpoint in ``folder``; return its weights."""
    data = dataset_folder("scenes")
    split, vocabulary = open_split(data, "train"), Vocabulary.of_folder(data)
    pairs = PairDataset(split.first(128), WordCaptions(split.first(128), vocabulary))
    torch.manual_seed(0)
    model = SCAN(len(vocabulary), split.feature_dim, width=32, word_dim=16)
    epochs = -(-RESUMED_STEPS // (len(pairs) // 64))
    config = TrainConfig(epochs=epochs, batch_size=64, checkpoint_every=CHECKPOINT_EVERY, device=device)  # pyright: ignore[reportArgumentType]
    train(model, HingeTriplet(), pairs, config, folder)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def steps_of(job: Job, device: str) -> Iterator[Finding]:
    """Each training of a run at its own size: seconds and peak memory of a step, and its scores in half precision."""
    shape = shape_of(job, sizes_of(job))
    for number, stage in enumerate(make_stages(job, shape, "meta")):
        name = f"{job.experiment.name}, {stage.name}"
        # Models are made inside, one after the other: the memory of a step is that of its own training.
        yield attempted(name, partial(step_finding, name, job, shape, number, device))
        half = f"{name}, bf16"
        yield attempted(half, partial(half_precision, half, job, shape, number, device))


def step_finding(name: str, job: Job, shape: Shape, number: int, device: str) -> Finding:
    """Time a few training steps of a run's stage of this number."""
    with peak_memory(device) as memory:
        stage = make_stages(job, shape, device)[number]
        steps = timed_steps(stage, make_batch(stage.config.batch_size, shape, device), STEPS, WARM_UP)
    pairs = stage.config.batch_size
    numbers = {"seconds": steps.median, "every step": steps.seconds, "pairs per second": pairs / steps.median}
    numbers |= {"peak bytes": memory.peak, "loss": steps.loss if math.isfinite(steps.loss) else None}
    found = f"{steps.median:.3f} s for a step of {pairs} pairs, {memory.peak / 2**30:.1f} GiB"
    return Finding(name, math.isfinite(steps.loss), found, numbers | step_settings(stage))


def step_settings(stage: Stage) -> dict[str, Any]:
    """What a step was timed with."""
    config = stage.config
    weights = sum(weight.numel() for weight in stage.model.parameters())
    return {
        "batch": config.batch_size,
        "precision": config.precision,
        "learning rate": config.learning_rate,
        "clip norm": config.clip_norm,
        "weights": weights,
    }


@dataclass
class PeakMemory:
    """peak: most bytes in use, of PyTorch's tensors on CUDA, of the whole process on other devices."""

    peak: int = 0


@contextmanager
def peak_memory(device: str) -> Iterator[PeakMemory]:
    """Measure the peak of the block: CUDA counts it; elsewhere it is read every few milliseconds."""
    memory = PeakMemory()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        yield memory
        memory.peak = torch.cuda.max_memory_allocated()
        return
    read = torch.mps.driver_allocated_memory if device == "mps" else lambda: psutil.Process().memory_info().rss
    done = threading.Event()

    def sample() -> None:
        while not done.is_set():
            memory.peak = max(memory.peak, read())
            done.wait(SAMPLED_EVERY)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        done.set()
        thread.join()


def half_precision(name: str, job: Job, shape: Shape, number: int, device: str) -> Finding:
    """The largest difference between scores in half and in single precision."""
    torch.manual_seed(0)
    model, batch = make_stages(job, shape, device)[number].model.eval(), make_batch(16, shape, device)
    with torch.inference_mode():
        whole = all_scores(model, batch)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            half = all_scores(model, batch)
    difference = float((whole - half).abs().max())
    found = f"scores differ by at most {difference:.1e}, {HALF_PRECISION} is promised"
    return Finding(name, difference <= HALF_PRECISION, found, {"difference": difference})


def all_scores(model: Matcher, batch: PairBatch) -> Tensor:
    """(i, c) scores of a batch in single precision, both directions side by side."""
    scores = model.score(model.encode_images(batch.images), model.encode_texts(batch.texts))
    return torch.cat([scores.i2t.float(), scores.t2i.float()])


def write_report(
    path: Path,
    device: str,
    findings: list[Finding],
    seconds: float,
    overrides: Sequence[str] = (),
    complete: bool = True,
) -> None:
    """Everything that was found, with what it was found on. complete: whether all checks were made."""
    facts: Mapping[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": code_of(Paths.find_or_none()).label,
        "overrides": list(overrides),
        "machine": machine_facts(device),
        "seconds": round(seconds, 1),
        "complete": complete,
        "ok": complete and all(finding.ok for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }
    write_json(path, facts)


def machine_facts(device: str) -> dict[str, Any]:
    """What decides how a device computes, and how fast; no names of people or of machines."""
    facts: dict[str, Any] = {
        "device": device,
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "memory": psutil.virtual_memory().total,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": found.name,
            "gpu memory": found.total_memory,
            "gpus": torch.cuda.device_count(),
            "capability": f"{found.major}.{found.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return facts

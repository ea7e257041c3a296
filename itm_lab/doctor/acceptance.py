"""Ten minutes that accept a GPU: does it compute, train, resume and hurry as the book expects?

Nobody who writes the book has every GPU. What this finds is written as one JSON file that a reader can send back.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from itm_lab.data.opening import dataset_folder
from itm_lab.experiments.cost import Shape, make_batch, make_stages, shape_of, sizes_of
from itm_lab.experiments.plan import plan_one
from itm_lab.experiments.runner import Job
from itm_lab.parity.comparison import comparing_on
from itm_lab.parity.reference_cases import run_folder
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import input_error
from itm_utils.files import write_json
from itm_utils.matcher import Matcher, PairBatch
from itm_utils.models.scan import SCAN
from itm_utils.models.vsepp import HingeTriplet
from itm_utils.training import TrainConfig
from itm_utils.training.loop import train

FORMAT = "itm-doctor-1"
# One training of each model at the size of its paper.
EXPERIMENTS = (
    "vsepp/f30k/vsepp", "scan/f30k/t2i_avg", "bfan/f30k/equal", "pfan/f30k/t2i", "vsrn/f30k/first", "saem/f30k/full",
    "sgraf/f30k/saf", "sgraf/f30k/sgr", "mmca/f30k/full", "dcpa/f30k/two_stages", "aoq/f30k/bfan_adapoffquin",
    "ccr_ccs/f30k/scan_ccr_ccs",
)  # fmt: skip
HALF_PRECISION = 0.02  # largest difference of a score, as book/how-to-use.md promises
STEPS, WARM_UP = 5, 2  # timed steps, and steps before them
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
    root: Path, device: str, golden: Path, experiments: tuple[str, ...] = EXPERIMENTS, overrides: tuple[str, ...] = ()
) -> Iterator[Finding]:
    """Every check, one by one, as it ends.

    golden: folder of reference cases. overrides: name=value, over the settings of every experiment.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise input_error("--device", "cuda", "a device this machine has", "PyTorch sees no GPU; see `itm doctor`.")
    yield reference_cases(golden, device)
    yield kill_and_resume(device)
    for name in experiments:
        job = plan_one(root, name, list(overrides))
        yield from steps_of(job, device)


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
    ok = interrupted > 0 and difference <= (0 if device == "cpu" else RESUME_TOLERANCE)
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
    for number, stage in enumerate(make_stages(job, shape, device)):
        name = f"{job.experiment.name}, {stage.name}"
        try:
            yield step_finding(name, stage.model, stage.objective, make_batch(stage.config.batch_size, shape, device))
        except torch.cuda.OutOfMemoryError:
            yield Finding(name, False, f"a batch of {stage.config.batch_size} does not fit into the memory")
        yield half_precision(f"{name}, bf16", job, shape, number, device)


def step_finding(name: str, model: Matcher, objective: Callable, batch: PairBatch) -> Finding:
    """Time a few training steps."""
    device, optimizer, taken = batch.images.regions.device, torch.optim.Adam(model.train().parameters()), []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        loss, _ = objective(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()  # waits until the device is done
        taken.append(time.perf_counter() - began)
    seconds = statistics.median(taken[WARM_UP:])
    numbers: dict[str, Any] = {"seconds": seconds, "pairs per second": len(batch) / seconds, "batch": len(batch)}
    if device.type == "cuda":
        numbers["peak bytes"] = torch.cuda.max_memory_allocated()
    memory = f", {numbers['peak bytes'] / 2**30:.1f} GB" if "peak bytes" in numbers else ""
    found = f"{seconds:.3f} s for a step of {len(batch)} pairs{memory}"
    return Finding(name, math.isfinite(value), found, numbers)


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


def write_report(path: Path, device: str, findings: list[Finding], seconds: float) -> None:
    """Everything that was found, with what it was found on."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    facts: Mapping[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,
        "seconds": round(seconds, 1),
        "ok": all(finding.ok for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }
    write_json(path, facts)

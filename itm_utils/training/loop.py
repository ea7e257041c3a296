"""The training loop of every chapter: one device or many, interrupted at will, resumed bit for bit."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from filelock import FileLock, Timeout
from torch import Tensor, nn

from itm_utils.data.batches import PairDataset, ResumableBatches, pair_loader
from itm_utils.errors import ItmError, input_error
from itm_utils.files import write_text
from itm_utils.matcher import Matcher, PairBatch
from itm_utils.progress import bar
from itm_utils.training import checkpoints
from itm_utils.training.schedule import TrainConfig, lr_multiplier

Objective = Callable[[Matcher, PairBatch], tuple[Tensor, dict[str, float]]]
Validation = Callable[[Matcher], Mapping[str, float]]

MEASURED = 20  # steps after which a long run says how long it will take
WORTH_SAYING = 120  # seconds
KEPT = 2  # checkpoints that stay on disk: the newest, and the one before it in case that one is damaged


@dataclass
class TrainResult:
    """log: the records of ``log.jsonl``. best: validation metrics of the chosen weights, with their step."""

    log: list[dict[str, Any]]
    best: dict[str, float]
    seconds: float


class _Step(nn.Module):
    """Objective and model as one module: what several processes synchronise is the gradient of its ``forward``."""

    def __init__(self, model: Matcher, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: PairBatch) -> tuple[Tensor, dict[str, float]]:
        return self.objective(self.model, batch)


def train(
    model: Matcher,
    objective: Objective,
    data: PairDataset,
    config: TrainConfig,
    run_dir: str | Path,
    validate: Validation | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train ``model`` in place; called again with the same arguments it goes on from the last checkpoint.

    The order of batches, the schedule and every random number depend on ``config`` and the step alone, so a run
    that was killed at any moment ends in the same weights as one that was not (bit for bit on a CPU; on a GPU as
    far as its kernels are deterministic). With ``validate`` the model ends with its best weights.

    Started by ``torchrun`` or ``accelerate launch``, the processes take turns in the batches, and each looks for
    negatives in its own: ``batch_size`` is that of one process.

    run_dir: receives ``log.jsonl``, ``best.safetensors`` and the newest checkpoints.
    provenance: what else must not change between two calls, besides model, objective, data and settings.
    """
    run = _Run(model, objective, data, config, Path(run_dir), validate, dict(provenance or {}))
    try:
        return run.finish()
    except KeyboardInterrupt:
        print(f"interrupted at step {run.step}; the same call goes on from the last checkpoint in {run.folder}")
        raise


class _Run:
    """The state of one training run."""

    objective: Objective
    best: dict[str, float]
    best_weights: dict[str, Tensor]
    log: list[dict[str, Any]]

    def __init__(
        self,
        model: Matcher,
        objective: Objective,
        data: PairDataset,
        config: TrainConfig,
        folder: Path,
        validate: Validation | None,
        provenance: dict[str, Any],
    ) -> None:
        if isinstance(objective, nn.Module) and any(True for _ in objective.parameters()):
            raise input_error("objective", "weights of its own", "none: what is trained belongs to the model")
        self.model, self.objective, self.config = model, objective, config
        self.folder, self.validate, self.provenance = folder, validate, provenance
        self.step, self.best, self.best_weights, self.log, self.seconds = 0, {}, {}, [], 0.0
        self.provenance |= data.identity() | {"objective": _described(objective)}
        set_seed(config.seed)
        # Two runs of one process may differ in device or precision; the library remembers the first otherwise.
        AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
        precision = "no" if config.precision == "fp32" else config.precision
        self.accelerator = Accelerator(cpu=config.device == "cpu", mixed_precision=precision)
        self.main = self.accelerator.is_main_process
        loader = pair_loader(data, config.batch_size, config.seed, config.num_workers, pin=self.device.type == "cuda")
        assert isinstance(loader.batch_sampler, ResumableBatches)
        self.sampler = loader.batch_sampler
        self.steps_per_epoch = len(self.sampler) // self.accelerator.num_processes
        if self.steps_per_epoch == 0:
            found = f"{config.batch_size}, less than one batch a process"
            raise input_error("batch_size", found, "more data or smaller batches")
        model.to(self.device)
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(self.trained, lr=config.learning_rate)
        self.forward, self.optimizer, self.loader = self.accelerator.prepare(_Step(model, objective), optimizer, loader)

    def _lock_run_dir(self) -> AbstractContextManager:
        """Lock the run directory until the process exits."""
        if not self.main:
            return nullcontext()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return FileLock(self.folder / ".lock").acquire(timeout=0)
        except Timeout:
            raise input_error(self.folder, "another process that trains in it", "a folder for each run") from None
        except OSError as error:
            raise input_error(self.folder, f"that it cannot be written ({error})", "a folder for this run") from error

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def total_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    def finish(self) -> TrainResult:
        """Go on from where the folder stands, to the end."""
        with self._lock_run_dir(), compiled_scores(self.model, self.config.compiled):
            self._resume()
            self._train()
        if self.best:
            self.model.load_state_dict(self.best_weights)
        return TrainResult(self.log, self.best, self.seconds)

    def _train(self) -> None:
        first, began = self.step, time.perf_counter()
        started = began - self.seconds
        progress = bar(range(self.total_steps), "train", "step", initial=self.step)
        while self.step < self.total_steps:
            epoch, self.sampler.first_batch = divmod(self.step, self.steps_per_epoch)
            self.sampler.first_batch *= self.accelerator.num_processes
            self.sampler.epoch = epoch
            if hasattr(self.objective, "set_epoch"):  # losses that change over time, such as a warm-up
                self.objective.set_epoch(epoch)
            self.model.set_epoch(epoch)  # and a model's own, that fade
            for batch in self.loader:
                record = self._train_step(batch)
                progress.update()
                progress.set_postfix(loss=f"{record['loss']:.3f}", best=self.best.get(self.config.select))
                self.seconds = time.perf_counter() - started
                if self.step == first + MEASURED:
                    self._say_how_long(time.perf_counter() - began)
                self._after_step(record)
        progress.close()

    def _say_how_long(self, seconds: float) -> None:
        """From the first steps of this call, what the others will take; validation not counted."""
        left = seconds / MEASURED * (self.total_steps - self.step)
        if self.main and left > WORTH_SAYING:
            hours, minutes = divmod(round(left / 60), 60)
            took = f"{hours} h {minutes} min" if hours else f"{minutes} min"
            print(f"{MEASURED} steps took {seconds:.1f} s: about {took} to go, validation not counted", flush=True)

    def _train_step(self, batch: PairBatch) -> dict[str, float]:
        self.model.train()
        rate = self.config.learning_rate * lr_multiplier(self.config, self.step / self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, logs = self.forward(batch)
        if not torch.isfinite(loss):
            hint = f"Look at the batch: images {batch.images.ids.tolist()[:5]} …"
            raise input_error("loss", f"{loss.item()} at step {self.step}", "a finite number", hint)
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.trained, self.config.clip_norm or math.inf)
        assert norm is not None  # DeepSpeed's is: it clips by itself
        if not torch.isfinite(norm):
            found = f"{norm.item()} at step {self.step}"
            raise input_error("gradient", found, "finite numbers", "Weights were not changed.")
        self.optimizer.step()
        self.step += 1
        return {"step": self.step, "loss": loss.item(), "rate": rate, "gradient_norm": float(norm), **logs}

    def _after_step(self, record: dict[str, float]) -> None:
        """Log, then validate, then save: a checkpoint holds all that happened up to its step."""
        self._write_log(record)
        every = self.config.validate_every or self.steps_per_epoch
        if self.validate is not None and (self.step % every == 0 or self.step == self.total_steps):
            self._validate(self.validate)
        if self.step % self.config.checkpoint_every == 0 or self.step == self.total_steps:
            self._save()

    def _validate(self, validate: Validation) -> None:
        metrics = {name: float(value) for name, value in validate(self.model).items()}
        if self.config.select not in metrics:
            raise input_error("select", repr(self.config.select), f"one of {', '.join(metrics)}")
        self._write_log({"step": self.step, **{f"val_{name}": value for name, value in metrics.items()}})
        if metrics[self.config.select] > self.best.get(self.config.select, -math.inf):  # never true for NaN
            self.best = {"step": self.step, **metrics}
            self.best_weights = {k: v.detach().to("cpu", copy=True) for k, v in self.model.state_dict().items()}

    def _write_log(self, record: dict[str, float]) -> None:
        self.log.append(record)
        if self.main:
            try:
                with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                raise input_error(
                    self.folder / "log.jsonl", f"that it cannot be written ({error})", "free space"
                ) from error

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must share with this run. A run may move to another machine: device and workers may
        change, and so then may the last digits."""
        free = ("num_workers", "device", "compiled", "checkpoint_every")
        settings = {k: v for k, v in asdict(self.config).items() if k not in free}
        settings["steps_per_epoch"] = self.steps_per_epoch
        return checkpoints.model_info(self.model, self.provenance) | {"settings": settings}

    def _save(self) -> None:
        if self.main:
            weights = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
            tensors = weights | checkpoints.optimizer_tensors(self.optimizer) | checkpoints.rng_tensors(self.device)
            # The best weights travel inside: a checkpoint is all there is to know about a run at its step.
            tensors |= {f"best.{name}": tensor for name, tensor in self.best_weights.items()}
            info = self._identity() | {"step": self.step, "best": self.best, "seconds": self.seconds}
            checkpoints.write_checkpoint(self.folder / f"step-{self.step:08d}.safetensors", tensors, info)
            for old in self._checkpoint_files()[:-KEPT]:
                old.unlink()
            if self.best:
                info = checkpoints.model_info(self.model, self.provenance) | {"best": self.best}
                best = {f"model.{name}": tensor for name, tensor in self.best_weights.items()}
                checkpoints.write_checkpoint(self.folder / "best.safetensors", best, info)
        self.accelerator.wait_for_everyone()

    def _checkpoint_files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.safetensors"))

    def _newest_checkpoint(self) -> tuple[Path, checkpoints.Checkpoint | None]:
        """The newest one that can be read; a damaged one is reported and passed over."""
        for path in reversed(self._checkpoint_files()):
            try:
                return path, checkpoints.read_checkpoint(path)
            except ItmError as error:
                print(f"{error} Going on from the one before.")
        return self.folder, None

    def _resume(self) -> None:
        """Go back to the newest checkpoint, and cut the log to what it knows."""
        path, checkpoint = self._newest_checkpoint()
        if checkpoint is not None:
            checkpoints.check_same(path, checkpoint.info, self._identity())
            checkpoints.load_weights(path, self.model, checkpoint)
            checkpoints.restore_optimizer(self.optimizer, checkpoint)
            checkpoints.restore_rng(checkpoint, self.device)
            self.best_weights = checkpoint.part("best.")
            self.step, self.best, self.seconds = (checkpoint.info[key] for key in ("step", "best", "seconds"))
        if self.main:
            for left_over in self.folder.glob(".*.tmp"):  # of a process that was killed while writing
                left_over.unlink()
            self.log = _cut_log(self.folder / "log.jsonl", self.step)
        self.accelerator.wait_for_everyone()


@contextmanager
def compiled_scores(model: Matcher, wanted: bool) -> Iterator[None]:
    """Temporarily compile the pairwise scoring methods, for any number of pairs and words.

    Not for good: a copy of the model would call the compiled methods of the original.
    """
    names = ("score", "score_pairs") if wanted else ()
    for name in names:
        setattr(model, name, torch.compile(getattr(model, name), dynamic=True))
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)


def _described(objective: Callable[..., Any]) -> dict[str, Any]:
    """Name and plain settings of an objective, those of its config dataclass included; names with an underscore are not."""
    if hasattr(objective, "set_epoch"):
        objective.set_epoch(0)  # as it was before any training
    name = getattr(objective, "__qualname__", type(objective).__qualname__)
    settings = getattr(objective, "__dict__", {})
    shown = {k: v for k, v in settings.items() if not k.startswith("_")}
    inner = {k: _described(v) for k, v in shown.items() if callable(v) and not isinstance(v, nn.Module | type)}
    for value in list(shown.values()):
        if is_dataclass(value) and not callable(value):
            shown = asdict(value) | shown
    plain = {k: v for k, v in shown.items() if isinstance(v, bool | int | float | str)}
    return {"name": name} | plain | inner  # an objective inside an objective counts too


def _cut_log(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep the records up to ``step``; a line that was cut off by a kill is dropped with those after it."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if record["step"] <= step:
            kept.append(record)
    write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept

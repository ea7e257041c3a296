"""The training loop of every chapter: one device or many, interrupted at will, resumed bit for bit."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, set_seed
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.utils.data import DataLoader

from itm_utils import distributed
from itm_utils.data.batches import PairDataset, ResumableBatches, pair_loader
from itm_utils.errors import ItmError, input_error
from itm_utils.files import write_text
from itm_utils.matcher import Encoded, Images, Matcher, PairBatch, Texts
from itm_utils.progress import bar
from itm_utils.training import checkpoints
from itm_utils.training.schedule import TrainConfig, lr_multiplier

# The second result goes into the log: numbers, or 0-dim tensors of any device, which are read later.
Objective = Callable[[Matcher, PairBatch], tuple[Tensor, Mapping[str, float | Tensor]]]
Validation = Callable[[Matcher], Mapping[str, float]]

READ_EVERY = 20  # steps between two readings of losses and norms: whoever reads waits for the device
MEASURED = 20  # steps after which a long run says how long it will take
WORTH_SAYING = 120  # seconds
COMPILATIONS = 4  # of one scoring method: what changes with every batch would be compiled without end
LOST = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
)  # gloo's words for a process that is gone
SAVE_REQUEST = "ITM_SAVE_REQUEST"  # environment: a file; where it appears, a checkpoint is written, and it is removed
KEPT = 2  # checkpoints that stay on disk: the newest, and the one before it in case that one is damaged


@dataclass
class TrainResult:
    """log: the records of ``log.jsonl``. best: validation metrics of the chosen weights, with their step.

    model: the one that was trained. captions_a_step: the size of a batch.
    """

    log: list[dict[str, Any]]
    best: dict[str, float]
    seconds: float
    model: Matcher | None = None
    captions_a_step: int = 0


class _Step(nn.Module):
    """Objective and model as one module: what several processes synchronise is the gradient of its ``forward``."""

    def __init__(self, model: Matcher, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: PairBatch) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        """Loss and logs of a batch, of which each of several processes has its share."""
        return self.objective(distributed.gathered(self.model), distributed.gather(batch, keep_features=True))


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

    Started by ``torchrun`` or ``accelerate launch``, every process has a share of each batch, and the loss is that of
    the whole one (see :mod:`itm_utils.distributed`): ``batch_size`` is that of all processes, and a run may go on with
    another number of them. Dropout then draws other random numbers than with one process.

    run_dir: receives ``log.jsonl``, ``best.safetensors`` and the newest checkpoints.
    provenance: what else must not change between two calls, besides model, objective, data and settings.
    """
    run = _Run(model, objective, data, config, Path(run_dir), validate, dict(provenance or {}))
    try:
        return run.finish()
    except KeyboardInterrupt:
        print(f"interrupted at step {run.step}; the same call goes on from the last checkpoint in {run.folder}")
        raise
    except RuntimeError as error:
        if distributed.processes() > 1 and any(sign in str(error) for sign in LOST):
            found = f"that another process has ended, at step {run.step}"
            hint = "Its own output says why. The same call goes on from the last checkpoint."
            raise input_error(run.folder, found, f"all {distributed.processes()} to go on", hint) from error
        raise


class _Run:
    """The state of one training run."""

    objective: Objective
    best: dict[str, float]
    best_weights: dict[str, Tensor]
    log: list[dict[str, Any]]
    unread: list[tuple[dict[str, Any], Tensor]]  # records whose numbers are still on the device, with their images
    whole: list[Path]  # checkpoints that this process read or wrote

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
        self.model, self.objective, self.data, self.config = model, objective, data, config
        self.folder, self.validate, self.provenance = folder, validate, provenance
        self.step, self.best, self.best_weights, self.log, self.seconds = 0, {}, {}, [], 0.0
        self.unread, self.whole = [], []
        self.request = Path(os.environ[SAVE_REQUEST]) if SAVE_REQUEST in os.environ else None
        self.provenance |= data.identity() | {"objective": _described(objective)}
        set_seed(config.seed)
        # Two runs of one process may differ in device or precision; the library remembers the first otherwise.
        AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
        precision = "no" if config.precision == "fp32" else config.precision
        loading = DataLoaderConfiguration(non_blocking=True)
        cpu = config.device == "cpu"
        # Unused weights: those of a part that a stage or an objective leaves out.
        synchronised = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(
            cpu=cpu, mixed_precision=precision, dataloader_config=loading, kwargs_handlers=[synchronised]
        )
        self.main, self.several = self.accelerator.is_main_process, self.accelerator.num_processes > 1
        if self.several:
            self.data = data = self._share_of(data)
        loader = pair_loader(data, config.batch_size, config.seed, config.num_workers, pin=self.device.type == "cuda")
        assert isinstance(loader.batch_sampler, ResumableBatches)
        self.sampler = loader.batch_sampler
        self.steps_per_epoch = len(self.sampler)
        model.to(self.device)
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(self.trained, lr=config.learning_rate)
        self.forward, self.optimizer = self.accelerator.prepare(_Step(model, objective), optimizer)
        self.loader = self._prepared(loader)

    def _share_of(self, data: PairDataset) -> PairDataset:
        """The same data, of whose batches this process loads its share."""
        count, least = self.accelerator.num_processes, distributed.LEAST * self.accelerator.num_processes
        if self.config.batch_size < least:
            expected = f"at least {least}, {distributed.LEAST} rows for each of {count} processes"
            raise input_error("batch_size", str(self.config.batch_size), expected, "Start fewer processes.")
        shared = copy(data)
        shared.part = (self.accelerator.process_index, count)
        return shared

    def _prepared(self, loader: DataLoader) -> DataLoader:
        """A loader whose batches arrive on the device."""
        if not self.several:
            return self.accelerator.prepare(loader)
        # A share of every batch, uneven ones too; the library would give each process whole batches in turn.
        return prepare_data_loader(
            loader, self.device, num_processes=1, process_index=0, put_on_device=True, non_blocking=True
        )

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
        return TrainResult(self.log, self.best, self.seconds, self.model, self.config.batch_size)

    def _train(self) -> None:
        first, began = self.step, time.perf_counter()
        started = began - self.seconds
        progress = bar(range(self.total_steps), "train", "step", initial=self.step)
        while self.step < self.total_steps:
            epoch, self.sampler.first_batch = divmod(self.step, self.steps_per_epoch)
            self.sampler.epoch = epoch
            changing: tuple[Any, ...] = (self.objective, self.data)  # as a warm-up, which reads no offline negatives
            for part in changing:
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            self.model.set_epoch(epoch)  # and a model's own, that fade
            for batch in self.loader:
                self._train_step(batch)
                progress.update()
                if self._due(READ_EVERY):
                    self._read_unread()
                    loss = self.log[-1]["loss"]
                    progress.set_postfix(loss=f"{loss:.3f}", best=self.best.get(self.config.select))
                self.seconds = time.perf_counter() - started
                if self.step == first + MEASURED:
                    self._say_how_long(time.perf_counter() - began)
                self._after_step()
        progress.close()

    def _say_how_long(self, seconds: float) -> None:
        """From the first steps of this call, what the others will take; validation not counted."""
        left = seconds / MEASURED * (self.total_steps - self.step)
        if self.main and left > WORTH_SAYING:
            hours, minutes = divmod(round(left / 60), 60)
            took = f"{hours} h {minutes} min" if hours else f"{minutes} min"
            print(f"{MEASURED} steps took {seconds:.1f} s: about {took} to go, validation not counted", flush=True)

    def _due(self, every: int) -> bool:
        """True every so many steps, and at the end."""
        return self.step % every == 0 or self.step == self.total_steps

    def _train_step(self, batch: PairBatch) -> None:
        """One update. Nothing in it waits for the device: its numbers are read later, by ``_read_unread``."""
        self.model.train()
        if self.several:  # the same random numbers everywhere, and after a resumption by any number of processes
            torch.manual_seed(int(np.random.SeedSequence([self.config.seed, self.step]).generate_state(1)[0]))
        learning_rate = self.config.learning_rate * lr_multiplier(self.config, self.step / self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss, logs = self.forward(batch)
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.trained, self.config.clip_norm or math.inf)
        assert norm is not None  # DeepSpeed's is: it clips by itself
        broken = ~(loss.detach().isfinite() & norm.isfinite())
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(broken, 0)  # so that weights stay numbers until somebody looks
        self.optimizer.step()
        self.step += 1
        record = {"step": self.step, "loss": loss, "learning_rate": learning_rate, "gradient_norm": norm, **logs}
        record = {name: value.detach() if isinstance(value, Tensor) else value for name, value in record.items()}
        self.unread.append((record, batch.images.ids))

    def _read_unread(self) -> None:
        """Wait for the device once, and log the steps since the last reading.

        A loss or gradient that is not finite ends the run here, before anything is validated or saved.
        """
        if not self.unread:
            return
        steps, self.unread = self.unread, []
        tensors = [(record, name) for record, _ in steps for name, value in record.items() if isinstance(value, Tensor)]
        together = torch.stack([record[name].float().to(self.device, non_blocking=True) for record, name in tensors])
        for (record, name), value in zip(tensors, together.tolist(), strict=True):
            record[name] = value
        for record, images in steps:
            self._check_finite(record, images)
            self._write_log(record)

    def _check_finite(self, record: dict[str, Any], images: Tensor) -> None:
        for name, expected in (("loss", "a finite number"), ("gradient_norm", "finite numbers")):
            if not math.isfinite(record[name]):
                found = f"{record[name]} at step {record['step'] - 1}"
                hint = f"No weights after this step were saved. Look at its batch: images {images.tolist()[:5]} …"
                raise input_error(name.removesuffix("_norm"), found, expected, hint)

    def _after_step(self) -> None:
        """Read, then validate, then save: a checkpoint holds all that happened up to its step."""
        validates = self.validate is not None and self._due(self.config.validate_every or self.steps_per_epoch)
        asked = self._asked_to_save()
        saves = asked or self._due(self.config.checkpoint_every)
        if validates or saves:
            self._read_unread()
        if validates:
            self._validate()
        if saves:
            self._save()
        if asked and self.main and self.request is not None:
            self.request.unlink(missing_ok=True)

    def _asked_to_save(self) -> bool:
        """Whether somebody who is about to end this process waits for a checkpoint. All processes ask in the same step."""
        if self.request is None or not self._due(READ_EVERY):
            return False
        return bool(distributed.agreed(self.main and self.request.exists()))

    def _validate(self) -> None:
        assert self.validate is not None
        metrics = {name: float(value) for name, value in self.validate(self.model).items()}
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
            tensors["log.records"] = _as_bytes(self.log)
            info = self._identity() | {"step": self.step, "best": self.best, "seconds": self.seconds}
            info["optimizer_tensors"] = sum(name.startswith("optimizer.") for name in tensors)
            path = self.folder / f"step-{self.step:08d}.safetensors"
            checkpoints.write_checkpoint(path, tensors, info)
            self._remove_old(path)
            self._write_best()
        self.accelerator.wait_for_everyone()

    def _write_best(self) -> None:
        """Write the best weights for other commands to open, unless the file is whole and holds them already."""
        path, info = self.folder / "best.safetensors", checkpoints.model_info(self.model, self.provenance)
        tensors = {f"model.{name}": tensor for name, tensor in self.best_weights.items()}
        if self.best and not _holds(path, tensors, self.best):
            checkpoints.write_checkpoint(path, tensors, info | {"best": self.best})

    def _remove_old(self, written: Path) -> None:
        """Keep the newest checkpoints that are known to be whole; without enough of them, keep all files."""
        self.whole = [*(path for path in self.whole if path != written), written][-KEPT:]
        if len(self.whole) == KEPT:
            for path in set(self._checkpoint_files()) - set(self.whole):
                path.unlink()

    def _checkpoint_files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.safetensors"))

    def _newest_checkpoint(self) -> checkpoints.Checkpoint | None:
        """The newest one that is whole; a damaged one is reported and passed over."""
        for path in reversed(self._checkpoint_files()):
            try:
                checkpoint = checkpoints.read_checkpoint(path)
            except ItmError as error:
                print(f"{error} Going on from the one before.")
                continue
            checkpoints.check_same(path, checkpoint.info, self._identity())
            try:
                checkpoints.check_complete(path, checkpoint, self.model, self.trained, self.total_steps)
            except ItmError as error:
                print(f"{error} Going on from the one before.")
                continue
            self.whole = [path]
            return checkpoint
        return None

    def _resume(self) -> None:
        """Go back to the newest checkpoint, and cut the log to what it knows."""
        checkpoint = self._newest_checkpoint()
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint.part("model."))
            checkpoints.restore_optimizer(self.optimizer, checkpoint)
            checkpoints.restore_rng(checkpoint, self.device)
            self.best_weights = checkpoint.part("best.")
            self.step, self.best, self.seconds = (checkpoint.info[key] for key in ("step", "best", "seconds"))
        if self.main:
            for left_over in self.folder.glob(".*.tmp"):  # of a process that was killed while writing
                left_over.unlink()
            self.log = _restored_log(self.folder / "log.jsonl", checkpoint)
            self._write_best()  # the last process may have ended before it could
        self.accelerator.wait_for_everyone()


@contextmanager
def compiled_scores(model: Matcher, wanted: bool) -> Iterator[None]:
    """Temporarily compile the methods that score pairs, those that ``model.compiles`` names.

    Not for good: a copy of the model would call the compiled methods of the original. Each method is compiled at most
    ``COMPILATIONS`` times; calls that would need more run as before.
    """
    if not wanted:
        yield
        return
    if not model.compiles:
        raise input_error("compiled", f"true for {type(model).__name__}", "false: compiling this model does not end")
    for name in model.compiles:
        setattr(model, name, _compiled(getattr(model, name)))
    try:
        with torch._dynamo.config.patch(recompile_limit=COMPILATIONS):
            yield
    finally:
        for name in model.compiles:
            delattr(model, name)


def _compiled(score: Callable[[Images, Texts], Any]) -> Callable[[Images, Texts], Any]:
    """A method of two encoded sides, compiled for any number of items and positions, and for their widths as they are.

    With widths as unknowns too (``dynamic=True``) MMCA's cross score was not done after 15 minutes.
    """
    compiled = torch.compile(score)

    def call(images: Images, texts: Texts) -> Any:
        for side in (images, texts):
            _mark_sizes(side)
        return compiled(images, texts)

    return call


def _mark_sizes(side: Encoded) -> None:
    """Tell the compiler that the numbers of items and of their positions may change."""
    by_item = (side.pooled, side.lengths, *side.extra.values())
    by_position = (side.local, side.mask, *side.extra_local.values())
    for axes, tensors in (((0,), by_item), ((0, 1), by_position)):
        for tensor in tensors:
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, axes)


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


def _as_bytes(log: list[dict[str, Any]]) -> Tensor:
    """The log as a tensor of bytes, so that a checkpoint has its digest: receipts are made from the log, too."""
    return torch.frombuffer(bytearray(json.dumps(log).encode()), dtype=torch.uint8)


def _holds(path: Path, tensors: Mapping[str, Tensor], best: Mapping[str, float]) -> bool:
    """Whether a file is whole and has these weights."""
    try:
        found = checkpoints.read_checkpoint(path)
    except ItmError:
        return False
    return found.info.get("best") == best and (
        checkpoints.tensor_digest(found.tensors) == checkpoints.tensor_digest(tensors)
    )


def _restored_log(path: Path, checkpoint: checkpoints.Checkpoint | None) -> list[dict[str, Any]]:
    """The log as the checkpoint has it, and the file made so."""
    log = json.loads(checkpoint.tensors["log.records"].numpy().tobytes()) if checkpoint else []
    write_text(path, "".join(json.dumps(record) + "\n" for record in log))
    return log

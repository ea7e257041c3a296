"""A minute's look at a machine and at a folder of datasets: what is there, what is missing, what to do."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from itm_lab.data.check import check_dataset
from itm_lab.data.registry import ENTITIES_FOLDER, ENTITIES_PAGE, KNOWN
from itm_lab.data.report import MISSING, NOTE, OK, CheckResult
from itm_lab.experiments.needs import text_encoder_need
from itm_utils.cache import cache_root

GIGABYTE = 2**30
ENOUGH_DISK, ENOUGH_MEMORY = 10 * GIGABYTE, 4 * GIGABYTE  # for the book on Scenes; a recipe's plan says its own needs
TEXT_ENCODER = "bert-base-uncased"


def check_machine(root: Path) -> Iterator[CheckResult]:
    """What every run needs: interpreter, PyTorch, a kernel, memory, disk and a cache that can be written."""
    yield CheckResult("Python", OK, platform.python_version())
    yield CheckResult("PyTorch", OK, f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield check_gpu()
    yield check_kernel()
    memory = psutil.virtual_memory().available
    low = "Close other programs: chapters on Scenes need about 4 GB."
    yield CheckResult("memory", *size_state(memory, ENOUGH_MEMORY, low))
    free = shutil.disk_usage(root).free
    low = "Features of Flickr30K take 13 GB and of COCO 33 GB; `itm run --dry-run` says what a run writes."
    yield CheckResult("disk", *size_state(free, ENOUGH_DISK, low))
    yield check_cache()
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    absent = "none; only runs with compiled=true need one"
    yield CheckResult("C++ compiler", OK if compiler else NOTE, Path(compiler).name if compiler else absent)


def size_state(found: int, enough: int, advice: str) -> tuple[str, str, str]:
    """State, words and advice about a size in bytes."""
    words = f"{found / GIGABYTE:.1f} GB free"
    return (OK, words, "") if found >= enough else (NOTE, words, advice)


def check_gpu() -> CheckResult:
    """The GPU that PyTorch sees, or that it sees none."""
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / GIGABYTE
        return CheckResult("GPU", OK, f"{torch.cuda.get_device_name()}, {memory:.0f} GB; accept it with --gpu")
    if torch.backends.mps.is_available():
        return CheckResult("GPU", OK, "Apple's (mps); accept it with --gpu --device mps")
    advice = 'Runs at paper size need one: make install TORCH="a CUDA build of torch".'
    return CheckResult("GPU", NOTE, "none that PyTorch can use", advice)


def check_kernel() -> CheckResult:
    """The Jupyter kernel in which papermill runs the chapters."""
    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        return CheckResult("Jupyter kernel", MISSING, "no kernel python3", "Run make install.")
    return CheckResult("Jupyter kernel", OK, spec.display_name)


def check_cache() -> CheckResult:
    """The folder where Scenes and token states are kept."""
    folder = cache_root()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return CheckResult("cache", MISSING, f"{folder} cannot be written", "Set ITM_CACHE to a folder that can.")
    return CheckResult("cache", OK, str(folder))


def check_data(data_root: Path) -> Iterator[CheckResult]:
    """The datasets of the papers below a folder, features unread; captions' text encoder and phrase boxes."""
    if not data_root.is_dir():
        yield CheckResult(str(data_root), MISSING, "no such folder", "Give the folder that holds the datasets.")
        return
    for name, known in KNOWN.items():
        findings, summary, whole = check_dataset(known, name, data_root, quick=True)
        advice = next((finding.advice for finding in findings if finding.advice), "")
        more = f"Details: itm data check {name} --root {data_root}."
        yield CheckResult(known.title, OK if whole else MISSING, summary, "" if whole else f"{advice} {more}".strip())
    entities = data_root / ENTITIES_FOLDER
    found = "there" if entities.is_dir() else "none; only attention metrics of CCR/CCS need phrases"
    advice = "" if entities.is_dir() else f"{ENTITIES_PAGE} to {entities}"
    yield CheckResult("Flickr30K Entities", OK if entities.is_dir() else NOTE, found, advice)
    yield check_text_encoder()


def check_text_encoder() -> CheckResult:
    """BERT, which SAEM, MMCA and DCPA read at paper size."""
    need = text_encoder_need(TEXT_ENCODER, Path())
    state = NOTE if need.unmet else need.state  # other recipes do without
    return CheckResult(TEXT_ENCODER, state, f"{need.found}; SAEM, MMCA and DCPA need it", need.get)

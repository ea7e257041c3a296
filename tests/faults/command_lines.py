"""Command lines of every `itm` command, as Hypothesis draws them: each must do its work or say clearly what is wrong.

They run in forked children, in a small checkout of the book. Where a command would work for minutes once it has read all
of its options (kernels, Sphinx), that work is left out.
"""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import torch
import typer
from click.testing import CliRunner
from damage import command_lines
from damaged_inputs import ACCEPTED, CLEAR, ROOT, TRACEBACK, receipt
from hypothesis.strategies import SearchStrategy
from toy_dataset import write_toy_dataset

from itm_lab.cli import app
from itm_lab.publish import build, execute
from itm_utils.models.scan import SCAN
from itm_utils.training.checkpoints import save_model

PATIENCE = 120  # seconds after which a command hangs
# Words that fit a parameter of this name, or look as if they did. A command may do with them whatever it does.
KNOWN: dict[str, Sequence[str]] = {
    "data": ["data/toy", "data", "scenes"], "data_root": ["data"], "folder": ["data/toy", "runs/a", "out"],
    "folders": ["runs/a"], "checkpoint": ["runs/a", "runs/a/best.safetensors"], "model": ["runs/a", "scan"], "run": ["runs/a"],
    "out": ["out/x", "out/x.png"], "split": ["test", "train", "dev"], "dataset": ["f30k", "coco", "entities", "flickr8k"], "public": ["data/toy/toy_vocab.json"],
    "vocabulary": ["data/toy/toy_vocab.json"], "files": ["receipts/02_scan/a_toy_s0.json", "data/toy/train_caps.txt"], "check": ["receipts/02_scan/a_toy_s0.json"],
    "experiments": ["scan/f30k/t2i_avg", "vsepp/scenes", "dcpa/f30k/two_stages"], "experiment": ["scan/f30k/t2i_avg"],
    "parameter": ["width=8", "dataset=data/toy", "device=cpu", "epochs=-1", "run_dir=runs/{x}", "variant=a/b"], "table": ["scan/table_1"],
    "seeds": ["0-1", "4-2"], "search": ["width=8,16"], "grid": ["margin=0.1,0.2"], "gpu": ["RTX 3090"], "jobs": ["1"],
    "names": ["scan"], "query": ["a red cube"], "image": ["test_00001.png", "0"], "top": ["1", "41"], "karpathy": ["k.json"],
    "json_file": ["k.json"], "captions": ["captions.csv"], "photos": ["data/toy"], "split_sizes": ["2,1,1"], "ref": ["main"], "repository": ["https://example.org/a"],
    "index": ["shelf"], "candidates": ["5"], "effort": ["1"], "kind": ["flat", "tree"], "of": ["images", "captions"], "trained_on": ["data/toy"],
    "variant": ["A"], "receipts": ["receipts"], "number": ["0"], "device": ["cuda", "cuda:99"], "write": ["out/recipes"], "texts": ["3"], "images": ["2"],
}  # fmt: skip
# Without options that say more they would work for minutes, or write into the package itself.
ALWAYS = {"run": ["--dry-run"], "scenes train-regions": ["--unknown"], "scenes train-bert": ["--unknown"], "parity": []}


def commands(group: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command with its name, ``data check``."""
    if (inside := getattr(group, "commands", None)) is None:  # typer has groups of its own
        yield name, group
        return
    for word, command in sorted(inside.items()):
        yield from commands(command, f"{name} {word}".strip())


COMMANDS = dict(commands(typer.main.get_command(app)))


def lines_of(name: str) -> SearchStrategy[list[str]]:
    """Command lines of one command."""
    drawn = command_lines(COMMANDS[name], KNOWN)
    return drawn.map(lambda words: [*name.split(), *ALWAYS.get(name, []), *words])


def write_checkout(folder: Path) -> None:
    """A book with one run, one dataset and one receipt."""
    for place in (
        "pyproject.toml",
        "constraints.txt",
        "_toc.yml",
        "_config.yml",
        "experiments",
        "book/data",
        "notebooks",
    ):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        source = ROOT / place
        shutil.copytree(source, folder / place) if source.is_dir() else shutil.copy(source, folder / place)
    write_toy_dataset(folder / "data/toy", {"train": 6, "dev": 4, "test": 4})
    torch.manual_seed(0)
    save_model(folder / "runs/a/best.safetensors", SCAN(17, 24, width=4, word_dim=4), {"fingerprint": "0"})
    receipt(folder / "receipts")
    (folder / "k.json").write_text('{"images": []}', encoding="utf-8")
    (folder / "captions.csv").write_text("a.png,two dogs\n", encoding="utf-8")


def call(words: list[str], checkout: Path) -> tuple[str, str]:
    """What came of one command line, and what it said if that was a traceback."""
    log = checkout / "log"
    child = os.fork()
    if not child:
        run_in_child(words, checkout, log)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outcome = {0: ACCEPTED, 1: CLEAR, 2: CLEAR}.get(status, TRACEBACK)
    said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if outcome == TRACEBACK:
        return outcome, f"itm {words}: exit code {status}\n{said[-3000:]}"
    if outcome == CLEAR and not said.strip():
        return TRACEBACK, f"itm {words}: fails without a word"
    return outcome, ""


def run_in_child(words: list[str], checkout: Path, log: Path) -> None:
    """Run one command line, and end the process: 0, 1 and 2 as the command does, 70 with a traceback."""
    code = 70
    try:
        signal.alarm(PATIENCE)
        os.chdir(checkout)
        log.unlink(missing_ok=True)
        execute.Run.execute = lambda self, folder, on_cell: None
        build.subprocess = type("NoSphinx", (), {"run": staticmethod(no_sphinx), "PIPE": None})  # pyright: ignore
        result = CliRunner().invoke(typer.main.get_command(app), words)
        said = result.output
        if result.exception is None or isinstance(result.exception, SystemExit):
            code = result.exit_code
            code = code if code in (0, 1, 2) else 70
        else:
            said += "".join(traceback.format_exception(result.exception))
        if any(not (c.isprintable() or c in "\n\t") for c in said):
            code, said = 70, f"characters that command a terminal: {said!r}"
        log.write_text(said, encoding="utf-8", errors="backslashreplace")
    except BaseException:
        log.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
    finally:
        os._exit(code)


def no_sphinx(*_: object, **__: object) -> object:
    """A build that fails at once."""
    return type("Result", (), {"returncode": 1})

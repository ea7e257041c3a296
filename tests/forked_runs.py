"""Runs of chapters in forks of the test process, where PyTorch and everything else is imported already.

For every run ``itm run`` starts papermill and a Jupyter kernel, which import for seven seconds before the first cell.
Where these programs are not what is tested, a fork makes the same papermill call and executes the cells itself:
planning, parameters, folders, logs, executed notebooks and receipts come about as ever.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from subprocess import TimeoutExpired
from typing import IO, Any

import click.testing
import pytest
from nbformat import NotebookNode, v4
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.experiments import runner

# What chapters and papermill import: once, before the first fork.
IMPORTED = (
    "IPython", "accelerate", "matplotlib.pyplot", "matplotlib_inline.backend_inline", "papermill.cli", "seaborn",
    "transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert", "itm_lab.records.chapter",
)  # fmt: skip


def can_train_in_a_fork() -> bool:
    """Whether autograd has no threads yet: tests on a second device start them, and a fork of such a process cannot train."""
    names = (path.read_text(encoding="utf-8") for path in Path("/proc/self/task").glob("*/comm"))
    return not any(name.startswith("pt_autograd") for name in names)


@contextmanager
def forked_runs() -> Iterator[None]:
    """Let the runner fork its runs for a while, where a fork can train; elsewhere they are processes as ever."""
    if not can_train_in_a_fork():
        yield
        return
    for name in IMPORTED:
        importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "start_dependent", Fork)
        yield


def itm(root: Path, *arguments: str) -> click.testing.Result:
    """An ``itm`` command in this process, given in the folder ``root``; its runs are forks."""
    with forked_runs(), chdir(root):
        return CliRunner().invoke(app, list(arguments))


class Fork:
    """In place of ``start_dependent``: a fork of this process that executes a chapter, with the methods of ``Popen``."""

    def __init__(
        self, module: list[str], stdout: IO[str], stderr: int, cwd: Path, env: dict[str, str], **settings: Any
    ) -> None:
        assert module[0] == "itm_lab.experiments.papermill_process", "only papermill is executed by a fork"
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _execute(module[1:], stdout.fileno(), cwd, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = 600) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutExpired("papermill", timeout)
            time.sleep(0.02)
        return code


def _execute(arguments: list[str], log: int, folder: Path, environment: dict[str, str]) -> None:
    """The papermill call of a run; this process ends here."""
    code = 1
    try:
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(log, stream)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(log), "w", buffering=1) for _ in range(2))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        _call_papermill(arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call_papermill(arguments: list[str]) -> None:
    from papermill.cli import papermill
    from papermill.engines import Engine, NotebookExecutionManager, papermill_engines

    class Here(Engine):
        """Executes the cells in this process; what they print goes to its log."""

        @classmethod
        def execute_managed_notebook(cls, nb_man: NotebookExecutionManager, kernel_name: str, **given: Any) -> None:
            execute_cells(nb_man.nb, nb_man)

    papermill_engines.register(None, Here)  # None: where no other engine is asked for
    papermill(arguments, standalone_mode=False)


def execute_cells(notebook: NotebookNode, manager: Any) -> None:
    """Run the code cells up to the first that fails, which is marked as a kernel marks it."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):
        def enable_gui(self, gui: str | None = None) -> None:
            """`%matplotlib inline` needs none."""

    shell = Shell.instance(config=Config(HistoryManager={"hist_file": ":memory:"}))
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        manager.cell_start(cell, index)
        ended = shell.run_cell(cell.source, store_history=True)
        if (error := ended.error_before_exec or ended.error_in_exec) is not None:
            name = type(error).__name__
            cell.outputs = [v4.new_output("error", ename=name, evalue=str(error), traceback=[f"{name}: {error}"])]
            manager.cell_exception(cell, index)
            return
        manager.cell_complete(cell, index)

"""Papermill as ``itm run`` starts it: the same command, whose kernel ends at once when its last cell has.

Papermill itself waits for the kernel to tidy up, for two to three seconds. All that a chapter leaves is on disk by then.

usage: python -m itm_lab.experiments.papermill_process [ARGUMENT …]      (as ``papermill``)

Of several processes that train together each runs the notebook; the executed copy of the first is that of the run, and
the others have one each beside it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from papermill.cli import papermill
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines


class PromptEngine(NBClientEngine):
    """Papermill's own engine, without the wait at the end."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: NotebookExecutionManager, kernel_name: str, *given: Any, **named: Any
    ) -> NotebookNode:
        """Run all cells, then end the kernel and whatever it started."""
        return super().execute_managed_notebook(nb_man, kernel_name, *given, shutdown_kernel="immediate", **named)


def own_output(arguments: list[str], rank: int) -> list[str]:
    """The arguments of papermill with a copy of its own for every process but the first: INPUT OUTPUT …"""
    if not rank:
        return arguments
    output = Path(arguments[1])
    return [arguments[0], str(output.with_name(f"{output.stem}-process-{rank + 1}.ipynb")), *arguments[2:]]


if __name__ == "__main__":
    sys.argv[1:] = own_output(sys.argv[1:], int(os.environ.get("RANK", "0")))
    papermill_engines.register(None, PromptEngine)  # None: where no other engine is asked for
    papermill(prog_name="papermill")

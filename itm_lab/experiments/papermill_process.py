"""Papermill as ``itm run`` starts it: the same command, whose kernel ends at once when its last cell has.

Papermill itself waits for the kernel to tidy up, for two to three seconds. All that a chapter leaves is on disk by then.

usage: python -m itm_lab.experiments.papermill_process [ARGUMENT …]      (as ``papermill``)
"""

from __future__ import annotations

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


if __name__ == "__main__":
    papermill_engines.register(None, PromptEngine)  # None: where no other engine is asked for
    papermill(prog_name="papermill")

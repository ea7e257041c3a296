"""How nbval sees the chapters: `pytest --nbval-lax --nbval-current-env notebooks`."""

from __future__ import annotations

import os

import pytest

from itm_lab.notebook_io import KERNEL_ENVIRONMENT

# Kernels inherit this: the stored outputs came from the same settings.
os.environ.update(KERNEL_ENVIRONMENT)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Number the cells: they are stored without counts, which nbval takes for cells that never ran."""
    cell = getattr(item, "cell", None)
    if cell is not None and cell.get("execution_count") is None:
        cell["execution_count"] = item.cell_num + 1

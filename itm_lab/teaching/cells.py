"""What a chapter needs to teach a class in several cells."""

from __future__ import annotations

from collections.abc import Callable

from itm_utils.errors import input_error


def add_to(owner: type) -> Callable[[Callable], Callable]:
    """Decorate a function in a later cell to make it a method of ``owner``; the exporter folds it into the class."""

    def add(method: Callable) -> Callable:
        if method.__name__ in vars(owner) and not _is_same(vars(owner)[method.__name__], method):
            name = f"{owner.__name__}.{method.__name__}"
            raise input_error(name, "a second definition", "one method of this name", "Edit the cell that defines it.")
        setattr(owner, method.__name__, method)
        return method

    return add


def _is_same(known: object, method: Callable) -> bool:
    """Whether a cell is run again: the method was added by ``add_to`` before, not written in the class."""
    return getattr(known, "__qualname__", "") == method.__qualname__

"""One exception for everything a reader can put right."""

from __future__ import annotations

from pathlib import Path


class ItmError(ValueError):
    """Bad input: the message names the file or parameter, what was found, and what to do."""


def printable(text: str) -> str:
    """Text for one line of a terminal: whatever could break the line or command the terminal is written as an escape.

    >>> printable("red \\x1b[31mdog")
    'red \\\\x1b[31mdog'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def input_error(where: str | Path, found: str, expected: str, hint: str = "") -> ItmError:
    """Build an :class:`ItmError` in the one form the whole package uses.

    >>> print(input_error("dev_caps.txt", "1,013 lines", "a multiple of 1,000 images"))
    dev_caps.txt: found 1,013 lines, expected a multiple of 1,000 images.
    """
    message = f"{where}: found {found}, expected {expected}."
    return ItmError(printable(f"{message} {hint}" if hint else message))

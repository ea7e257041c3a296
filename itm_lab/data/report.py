"""One table of findings, and a sentence about the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from itm_utils.errors import ItmError

OK, NOTE, MISSING, DAMAGED = "ok", "note", "missing", "damaged"


@dataclass(frozen=True)
class CheckResult:
    """A line of the table. advice: what to do about it, printed below the table."""

    what: str
    state: str
    found: str
    advice: str = ""


def damaged(what: str, error: ItmError) -> CheckResult:
    """An error of a reader as a line of the table; its first words, the path, stand there already."""
    path, _, rest = str(error).partition(": found ")
    return CheckResult(what, DAMAGED, rest or path)


def table(findings: Iterable[CheckResult]) -> Iterator[str]:
    """Lines of the table, then the advice, each piece once."""
    findings = list(findings)
    first = max(len(finding.what) for finding in findings)
    second = max(len(finding.state) for finding in findings)
    for finding in findings:
        yield f"{finding.what:{first}}  {finding.state:{second}}  {finding.found}"
    advice = dict.fromkeys(f"{finding.what}: {finding.advice}" for finding in findings if finding.advice)
    if advice:
        yield ""
        yield from advice


def conclusion(title: str, findings: Iterable[CheckResult], whole: str) -> tuple[str, bool]:
    """A plain sentence, and whether everything is there and sound. whole: what to say of sound data."""
    count = {state: sum(finding.state == state for finding in findings) for state in (MISSING, DAMAGED)}
    if not any(count.values()):
        return f"{title} is whole: {whole}.", True
    said = [f"{number} {state}" for state, number in count.items() if number]
    return f"{title} is not whole: {' and '.join(said)}, as listed above.", False

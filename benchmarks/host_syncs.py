"""How often would a GPU's host wait? Counted on the second device of the tests, per training step and per scoring.

    python -m benchmarks.host_syncs

(a minute; needs no GPU; writes results/host_syncs.json: for every matcher the waits of one training step with every
objective, null where the two do not fit, and of scoring its encodings)
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness import finish, start

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "contract")]

from contract_cases import DEFAULTS, OBJECTIVES  # noqa: E402 - the path above is needed
from count_syncs import scoring_syncs, step_syncs  # noqa: E402


def main() -> None:
    args = start(__doc__, "host_syncs.json")
    table: dict[str, dict[str, int | None]] = {}
    for case in DEFAULTS:
        found = {objective.__name__: step_syncs(case, objective) for objective in OBJECTIVES}
        row = {name: None if syncs is None else len(syncs) for name, syncs in found.items()}
        table[str(case)] = row | {"scoring": len(scoring_syncs(case))}
        print(f"{case!s:12}", *(f"{name} {count}" for name, count in table[str(case)].items()), flush=True)
    finish(args, {"host_syncs": table})


if __name__ == "__main__":
    main()

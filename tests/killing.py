"""Death at a chosen moment, for the programs that tests kill and start again."""

from __future__ import annotations

import os
import signal


def die_at(owner: object, name: str, call: int) -> None:
    """Kill this process, without warning, when ``owner.name`` is called for the given time."""
    original, left = getattr(owner, name), [call]

    def mortal(*arguments, **settings):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **settings)

    setattr(owner, name, mortal)


def listens_to_interrupts() -> None:
    """For ``preexec_fn``: a shell starts its background jobs deaf to Ctrl-C, and they pass it on to their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

"""Several processes of one program, as ``torchrun`` starts them: where one fails, the others are ended, and one line says so.

usage: python -m itm_lab.experiments.launch PROCESSES MODULE [ARGUMENT …]
"""

from __future__ import annotations

import signal
import sys
from datetime import timedelta

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

PATIENCE = timedelta(seconds=60)  # for the processes to find each other


def launch(count: int, module: str, arguments: list[str]) -> int:
    """Run ``python -m module …`` in so many processes of this machine; returns the exit code."""
    # torch's own launcher: it chooses a port, sets the environment, and watches over its processes
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": PATIENCE.seconds},
        max_restarts=0,  # `itm run` goes on from the last checkpoint, and says so
        monitor_interval=0.5,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        print(f"process {number + 1} of {count} {how_it_ended(failure.exitcode)}; the others were ended", flush=True)
        return 1
    except SignalException as error:
        return -error.sigval
    return 0


def how_it_ended(code: int) -> str:
    """In words, from an exit code."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"


if __name__ == "__main__":
    sys.exit(launch(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))

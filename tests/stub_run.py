"""A job of a cluster that pretends to train, in a tenth of a second: what is tested with it is the way of jobs, not of runs.

``events.json`` in the folder of the run says what happens after which step: "limit" and "lost" are told to the stand-in
for SLURM, "signal" is what submitit's own executor sends at the time limit, "fail" is an error. Each happens once. The
receipt that the run is to end with lies in the folder, too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from submitit.helpers import DelayedSubmission

if TYPE_CHECKING:
    from itm_lab.experiments.cluster import Sent

STEPS, SAVES = 60, 10


class StubRun:
    """As ``ClusterRun``: called in the job, asked for a checkpoint at its limit. It saves after every ten steps, too."""

    def __init__(self, sent: Sent) -> None:
        self.given, self.step = dict(sent.parameters, results=sent.results, root=sent.root), 0

    @property
    def folder(self) -> Path:
        return Path(self.given["root"], self.given["run_dir"])

    def __call__(self) -> None:
        saved = self.folder / "saved"
        self.step = int(saved.read_text()) if saved.exists() else 0
        self.note(began=self.step)
        while self.step < STEPS:
            self.step += 1
            self.note(step=self.step)
            if self.step % SAVES == 0:
                saved.write_text(str(self.step))
            self.happen(self.events().get(str(self.step)))
            time.sleep(0.002)
        shutil.copytree(self.folder / "prepared", self.given["results"], dirs_exist_ok=True)

    def checkpoint(self) -> DelayedSubmission:
        (self.folder / "saved").write_text(str(self.step))
        again = StubRun.__new__(StubRun)
        again.given, again.step = self.given, 0
        return DelayedSubmission(again)

    def note(self, **record: int) -> None:
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")

    def events(self) -> dict[str, Any]:
        path = self.folder / "events.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def happen(self, event: str | None) -> None:
        """Whatever is to happen now, once; what others do, they do after a while."""
        if event is None:
            return
        left = {step: one for step, one in self.events().items() if int(step) != self.step}
        (self.folder / "events.json").write_text(json.dumps(left))
        if event == "fail":
            raise RuntimeError("the data are gone")
        if event == "signal":
            os.kill(os.getpid(), signal.SIGUSR2)
        elif event in ("limit", "lost"):
            Path(os.environ["SLURM_STAND_IN"], f"{os.environ['SLURM_JOB_ID']}.{event}").touch()
        time.sleep(60)

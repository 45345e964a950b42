"""Plugins that disturb the machine of their rank from within a run, at a step: see `nodes`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

from forge_train import Batch, BatchPhase, Ge, Plugin, PrepareBatch, Volatile, hookimpl, section


class Cable(Plugin):
    """A rank does a line of shell before the optimizer's step of a given number, where there are so many ranks."""

    api = (1, 0)

    @section
    class Config:
        does: Annotated[str, Volatile()] = ""
        at: Annotated[int, Ge(0), Volatile()] = 0
        rank: Annotated[int, Ge(0), Volatile()] = 1
        world: Annotated[int, Ge(0), Volatile()] = 2

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        place = tuple(int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
        if update.step == self.config.at and place == (self.config.rank, self.config.world):
            more = {"LAUNCHER": str(os.getppid())}
            subprocess.run(["sh", "-ec", self.config.does], env={**os.environ, **more}, check=True)


class Rows(Plugin):
    """Writes down which rows each rank trains on, step by step."""

    api = (1, 0)

    @hookimpl
    def prepare_batch(self, job: Any) -> Any:
        self.job, self.rows = job, list[str]()

        def note(batch: Batch) -> Batch:
            self.rows += [hashlib.sha256(bytes(row.numpy())).hexdigest()[:16] for row in batch.inputs]
            return batch

        return PrepareBatch(BatchPhase.SLICE, note)

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.attempt = job.dist.on_main(time.monotonic)

    @hookimpl
    def on_step(self, step: Any) -> None:
        line = {"attempt": self.attempt, "step": step.step, "rows": self.rows}
        with (Path(self.job.run.dir) / f"rows-{self.job.dist.rank}.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        self.rows = []


class Until(Plugin):
    """A rank that is alone tells so in a pipe at step 9, and waits there to be asked to stop."""

    api = (1, 0)

    @section
    class Config:
        told: Annotated[str, Volatile()] = ""

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.job, self.asked = job, False

    @hookimpl
    def on_step(self, step: Any) -> None:
        if step.step == 9 and self.job.dist.world == 1 and self.config.told:
            Path(self.config.told).write_text("alone", encoding="utf-8")
            while not self.job.control._asked.stop:
                time.sleep(0.05)

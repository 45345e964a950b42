"""A run on two ranks of which one is slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from forge_train import Job, Plugin, hookimpl
from forge_train_tools.testing import run_forge


class Slow(Plugin):
    """Dawdles on rank 1 after each update's gradients are there."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Job) -> None:
        self.rank = job.dist.rank

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        time.sleep(0.05 * self.rank)


def train(folder: str) -> dict[str, Any]:
    """The last line of the run."""
    config = {"parallel.dp_shard": 2, "log.every": 2}
    run = run_forge(["resources", "resource_cases:Slow", "fsdp2"], config, steps=4, folder=Path(folder), name="slow")
    return run.metrics[-1]

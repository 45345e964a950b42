"""A profiled run on two ranks of which one is late at a collective."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from forge_train import Job, Plugin, hookimpl
from forge_train_tools.testing import run_forge


class Late(Plugin):
    """Adds something up over ranks before each update; rank 1 comes 70 ms late."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Job) -> None:
        self.job = job

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        self.job.dist.barrier()
        time.sleep(0.07 * self.job.dist.rank)
        self.job.dist.all_reduce(torch.ones(3))


def train(folder: str) -> str:
    """The run's folder."""
    config = {"parallel.dp_shard": 2, "profile.start": 2, "profile.steps": 2}
    return str(
        run_forge(["profile", "fsdp2", "profile_cases:Late"], config, steps=4, folder=Path(folder), name="p").run
    )

"""Trackers on several ranks. As `tracker_cases:Barrier`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge_train import Bins
from forge_train_kit.tracking import Tracker
from forge_train_tools.testing import run_forge


class Barrier(Tracker):
    """Waits for ranks that do not come."""

    api = (1, 0)

    def open(self, run: Any, config: Mapping[str, Any]) -> None:
        print("opened by rank", os.environ["RANK"])

    def log(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None:
        self.wait()

    def wait(self) -> None:
        dist.barrier()


class Gathers(Barrier):
    """Asks ranks that do not listen."""

    def wait(self) -> None:
        dist.all_gather_object([None] * dist.get_world_size(), "hello")


class Reduces(Barrier):
    """Adds up what nobody else does."""

    def wait(self) -> None:
        dist.all_reduce(torch.ones(2))


def train(folder: str, plugins: list[str]) -> dict[str, Any]:
    """Train on these ranks; the numbers, and what was warned of."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("forge_train").addHandler(handler)
    try:
        config = {"parallel.dp_shard": 2}
        run = run_forge(["fsdp2", *plugins], config, steps=6, name="tracked", folder=Path(folder))
    finally:
        logging.getLogger("forge_train").removeHandler(handler)
    return {"numbers": run.numbers, "warnings": warnings, "files": sorted(path.name for path in run.run.glob("csv/*"))}

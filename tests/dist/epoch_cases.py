"""Runs on ranks of which each record that is learned is noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_train import MASKED, Batch, BatchPhase, Job, Plugin, PrepareBatch, hookimpl
from forge_train_tools.testing import run_forge


class Noted(Plugin):
    """The records of every batch that a rank is given, as text, by its place among the data ranks."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.records: list[str] = []

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch:
        def note(batch: Batch) -> Batch:
            for inputs, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
                if any(label != MASKED for label in labels):
                    self.records.append(bytes(one for one in inputs if one < 256).decode())
            return batch

        return PrepareBatch(BatchPhase.MASK, note)


def trained(
    folder: str, plugins: Sequence[str], config: Mapping[str, Any], name: str = "", stop_at: int | None = None
) -> tuple[int, int, list[str]]:
    """The data rank, the last step, and the records in the order in which they were read."""
    run = run_forge(
        ("sft", *plugins, Noted),
        {
            "train.steps": 0,
            "train.epochs": 1,
            "sft.held_out": 0,
            "sft.template": "plain",
            "sft.packing": "pad",
            **config,
        },
        name=name,
        stop_at=stop_at,
        folder=Path(folder),
    )
    noted = next(one for one in run.job.hooks.plugins.values() if isinstance(one, Noted))
    return run.job.dist.data_rank, run.finished.step, noted.records

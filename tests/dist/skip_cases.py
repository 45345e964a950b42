"""Gradients that are sometimes too large, and what ranks do with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_train import Plugin, StepResult, Update, hookimpl
from forge_train_tools.testing import run_forge


class Burst(Plugin):
    """Gradients a thousand times too large at steps 5 and 11; told before `skip_step` by its name."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.skipped: list[int] = []

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        if update.step in (5, 11):
            update.scale(1000.0)

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if step.skipped:
            self.skipped.append(step.step)


def train(folder: str, config: Mapping[str, Any]) -> dict[str, Any]:
    run = run_forge(["fsdp2", "skip_step", Burst], {**config}, steps=14, folder=Path(folder), name="run")
    return {"skipped": run.plugin("burst").skipped, "state": run.plugin("skip_step").state_dict()}

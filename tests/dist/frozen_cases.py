"""What ranks are asked about a model of which a part is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_train import Job, Model, Plugin, Update, hookimpl
from forge_train_tools.testing.runs import run_forge


class Trained(Plugin):
    """Notes the parameters that need gradients in each step, copies of what other parts have among them."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps: list[list[str]] = []

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        self.model = model

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        named = (pair for part in self.model.parts for pair in part.named_parameters())
        self.steps.append([name for name, one in named if one.requires_grad])


def trained(folder: str, plugins: list[str], config: dict[str, Any], steps: int) -> list[list[str]]:
    """The names of what is trained on this rank, by step."""
    noted: Any = run_forge((*plugins, Trained), config, steps=steps, folder=Path(folder)).plugin("trained")
    found: list[list[str]] = noted.steps
    return found

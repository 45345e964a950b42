"""Gradients of the first steps of a tiny run, on ranks of a pool or alone."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cases import tiny, whole
from forge_train import Job, Model, Plugin, Update, hookimpl

STEPS = 3


class Gradients(Plugin):
    """Keeps those of every step."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps: list[dict[str, Tensor]] = []

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.model = model

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        given = ((name, one.grad) for name, one in self.model.named_parameters() if one.grad is not None)
        self.steps.append({name: whole(gradient).clone() for name, gradient in given})


def gradients(folder: str, plugins: Sequence[str], config: Mapping[str, Any], file: str) -> None:
    """Leave the whole gradients of each step in a file."""
    run = tiny(folder, (*plugins, Gradients), config, steps=STEPS)
    parts = run.job.dist.gather_stages(run.plugin("gradients").steps)
    if run.job.dist.main:
        torch.save([dict(ChainMap(*step)) for step in zip(*parts, strict=True)], file)

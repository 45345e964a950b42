"""Rounding errors of the weights: with them, one process moves as far as another order of summation moves a layout."""

from __future__ import annotations

from typing import Any

import torch

from forge_train import Plugin, hookimpl, section

STEPS = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Between two neighbouring numbers of a precision, relative."""


class Jittered(Plugin):
    """Moves each weight up or down by up to one rounding error of the run's precision, before the first step."""

    api = (1, 0)

    @section
    class Config:
        draw: int = 1

    @hookimpl
    def on_start(self, job: Any, model: Any) -> None:
        size = STEPS[job.config.train.precision]
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                chance = torch.Generator().manual_seed(1000 * self.config.draw + number)
                noise = torch.rand(parameter.shape, generator=chance) * 2 - 1
                parameter.mul_(1 + size * noise.to(parameter.device))

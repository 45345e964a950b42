"""Torch's AdamW on bf16 parameters as they are: no masters, states in bf16, everything rounded to nearest."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from forge_train import Plugin, hookimpl, section
from forge_train_kit.sections import OptimizerSection

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from forge_train import Job, Model


class Nearest(Plugin):
    """AdamW as KempnerForge has it (kempnerforge/training/optimizer.py): fused, in the dtype of the parameters."""

    api = (1, 0)
    facts: ClassVar[Mapping[str, bool]] = {"plan.per_unit": True}

    @section
    class Config(OptimizerSection):
        pass

    config: Config

    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        import torch

        from forge_train_kit.optim import decay_groups

        return torch.optim.AdamW(decay_groups(model, job, self.config), lr=self.config.lr, fused=True)

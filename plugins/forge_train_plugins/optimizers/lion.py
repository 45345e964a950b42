"""An optimizer with one state per weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from forge_train import Ge, Gt, Plugin, hookimpl, section
from forge_train_kit.sections import Beta, OptimizerSection

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Model


class Lion(Plugin):
    """Sign-momentum optimizer with half of Adam's state (Chen et al. 2023, arXiv:2302.06675)."""

    api = (1, 0)
    facts = {"plan.per_unit": True}

    @section
    class Config(OptimizerSection):
        lr: Annotated[float, Gt(0)] = 1e-4
        """Peak learning rate: every weight moves by just this much; a third to a tenth of Adam's."""
        betas: tuple[Beta, Beta] = (0.9, 0.99)
        """Share of the momentum in the update, and decay of the momentum."""
        weight_decay: Annotated[float, Ge(0)] = 0.1
        """Of matrices; norms and biases do not decay. With a smaller lr it takes a larger one."""

    config: Config

    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        from forge_train_kit.optim import decay_groups, narrowed

        from ._lion import SignMomentum

        config = self.config
        groups = decay_groups(model, job, config)
        made = SignMomentum(groups, lr=config.lr, betas=config.betas)
        return narrowed(made, model, job, config.state, first=("momentum",))

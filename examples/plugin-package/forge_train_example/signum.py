"""An optimizer: the slot `optimizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from forge_train import Ge, Gt, Lt, Plugin, hookimpl, section

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Model


class Signum(Plugin):
    """Steps along the sign of the momentum (Bernstein et al. 2018, arXiv:1802.04434)."""

    api = (1, 0)

    @section
    class Config:
        lr: Annotated[float, Gt(0)] = 1e-3
        """Every weight moves by just this much."""
        momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
        """Decay of the running mean of the gradients."""

    config: Config

    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        from ._signum import SignDescent

        return SignDescent(model.parameters(), lr=self.config.lr, momentum=self.config.momentum)

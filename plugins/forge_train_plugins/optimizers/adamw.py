"""The default optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from forge_train import Gt, Plugin, hookimpl, section
from forge_train_kit.sections import Beta, OptimizerSection

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Model


class AdamW(Plugin):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101), fused on every device."""

    api = (1, 0)
    facts = {"plan.per_unit": True}

    @section
    class Config(OptimizerSection):
        betas: tuple[Beta, Beta] = (0.9, 0.95)
        """Decay of the running means of the gradient and of its square."""
        eps: Annotated[float, Gt(0)] = 1e-8
        """Added to the root of the second."""

    config: Config

    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        import torch

        from forge_train_kit.optim import decay_groups, narrowed

        config = self.config
        groups = decay_groups(model, job, config)
        made = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        return narrowed(made, model, job, config.state, first=("exp_avg",), second=("exp_avg_sq",))

"""An optimizer without a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import Ge, Gt, Lt, Plugin, Problem, Schedule, Span, SpanName, hookimpl, section
from forge_train_kit.contract import EvaluatedWeights
from forge_train_kit.sections import Beta, OptimizerSection

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Model
    from forge_train.config import Config as RunConfig


class ScheduleFree(Plugin):
    """AdamW that needs no schedule (Defazio et al. 2024, arXiv:2405.15682).

    It trains at one point, and evaluates a running average.
    """

    api = (1, 0)
    facts = {"plan.per_unit": True}

    @section
    class Config(OptimizerSection):
        lr: Annotated[float, Gt(0)] = 2.5e-3
        """Learning rate after the warm-up; one to ten times AdamW's."""
        warmup: Annotated[int, Ge(0)] = 0
        """Steps over which the learning rate rises. It then stays: this plugin is its own `lr_schedule`."""
        betas: tuple[Annotated[float, Gt(0), Lt(1)], Beta] = (0.9, 0.999)
        """Share of the average in the point that is trained, and decay of the running mean of squares."""
        eps: Annotated[float, Gt(0)] = 1e-8
        """Added to the root of the mean of squares."""
        weight_decay: Annotated[float, Ge(0)] = 0.1
        """Of matrices, at the point that is trained; norms and biases do not decay."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._optimizer: torch.optim.Optimizer | None = None

    @hookimpl
    def optimizer(self, model: Model, job: Job) -> torch.optim.Optimizer:
        from forge_train_kit.optim import decay_groups, narrowed

        from ._schedule_free import ScheduleFreeAdamW

        config = self.config
        groups = decay_groups(model, job, config)
        made = ScheduleFreeAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        return narrowed(made, model, job, config.state, second=("exp_avg_sq",))

    @hookimpl
    def lr_schedule(self, optimizer: torch.optim.Optimizer) -> Schedule:
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(self.config.warmup, 1)))

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        steps, warmup = config.train.total_steps, self.config.warmup
        if steps and warmup >= steps:
            yield Problem("schedule_free.warmup", f"{warmup:,} leave none of the run's {steps:,} steps to train at.")

    @hookimpl
    def on_start(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        from ._schedule_free import averaged, shares

        if span != "evaluate":
            return None
        beta, names = self.config.betas[0], ("model.{name}", "optimizer.state.{name}.z")
        return EvaluatedWeights(
            lambda: averaged(self._optimizer, beta) if self._optimizer else nullcontext(),
            dict(zip(names, shares(beta), strict=True)),
        )

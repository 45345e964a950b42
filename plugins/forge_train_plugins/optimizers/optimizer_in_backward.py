"""Updates during the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError, Plugin, Problem, Update, hookimpl

if TYPE_CHECKING:
    import torch

    from forge_train import Job
    from forge_train.config import Config as RunConfig


class OptimizerInBackward(Plugin):
    """Updates each parameter as soon as its gradient is there, and frees the gradient: less memory on one process.

    No gradient sees another: `train.clip_norm` must be 0, and a step is one micro-batch. `forge plan` counts the
    gradients as if they were kept.
    """

    api = (1, 0)
    facts = {"check.example": ("train.clip_norm=0", "train.micro_batch=0")}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._squares: list[torch.Tensor] = []

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        train = config.train
        for axis, size in vars(config.parallel).items():
            if size > 1:
                yield Problem(f"parallel.{axis}", "optimizer_in_backward is for one process; set this to 1.")
                return
        if train.clip_norm:
            yield Problem(
                "train.clip_norm", "optimizer_in_backward knows no global norm when it updates; set this to 0."
            )
        if train.batch_warmup:
            yield Problem("train.batch_warmup", "optimizer_in_backward takes one micro-batch a step, of one size.")
        elif train.micro_batch not in (0, train.global_batch):
            yield Problem(
                "train.micro_batch",
                "optimizer_in_backward takes one micro-batch a step, on one process; set this to 0.",
            )

    @hookimpl
    def on_start(self, job: Job, optimizer: torch.optim.Optimizer) -> None:
        from ._optimizer_in_backward import update_in_backward

        if job.dist.world > 1:
            raise ConfigError(f"optimizer_in_backward is for one process; this run has {job.dist.world}.")
        if scaling := job.hooks.provider("loss_scale"):
            raise ConfigError(f"optimizer_in_backward can't leave a step out, as {scaling} may have to.")
        for name, plugin in job.hooks.plugins.items():
            if plugin is not self and hasattr(plugin, "on_gradients"):
                raise ConfigError(f"{name} has to see a step's gradients, and optimizer_in_backward keeps none.")
        update_in_backward(optimizer, self._squares)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        import torch

        update.grad_norm = torch.stack(self._squares).sum().sqrt()
        self._squares.clear()

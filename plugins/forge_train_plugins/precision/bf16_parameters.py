"""Parameters in fewer bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train import ConfigError, Phase, Plugin, Transform, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_train import Applied, Job


class BF16Parameters(Plugin):
    """Holds parameters and their gradients in bf16, between steps too.

    The optimizer keeps fp32 masters, or rounds stochastically (`state.masters`).
    """

    api = (1, 0)
    facts = {"check.example": ("train.precision=bf16",), "verify.rounds": 2.0**-8, "plan.per_unit": True}
    provides = ("parameter_dtype",)

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        precision = job.config.train.precision
        if precision != "bf16":
            text = f"train.precision: is {precision!r}; bf16_parameters needs 'bf16'."
            raise ConfigError(text, key="train.precision")

        def apply(part: nn.Module) -> Applied:
            from ._bf16_parameters import narrow

            return narrow(part)

        # After what replaces or adds layers; before SHARD takes parameters as they are.
        return Transform(Phase.FLOAT8, "parameter_dtype", apply)

    @hookimpl
    def on_start(self, optimizer: torch.optim.Optimizer, job: Job) -> None:
        if getattr(optimizer, "at_rest", None) is None:
            raise ConfigError(
                f"{job.hooks.provider('optimizer')} would round its updates to bf16, and lose most of them: it keeps "
                "no masters. Use adamw, lion, muon or schedule_free, or leave out bf16_parameters."
            )

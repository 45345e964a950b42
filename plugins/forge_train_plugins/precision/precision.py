"""Narrow arithmetic where weights are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train import Phase, Plugin, Transform, hookimpl

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Applied, Job


class Precision(Plugin):
    """Computes in the dtype of `train.precision`, from weights that stay fp32; without autocast.

    Every module that owns weights reads them as narrow copies, made anew in each forward pass, so that activations are
    narrow too; gradients come back in fp32, and names, optimizer and checkpoints do not change. A transform that covers
    the precision itself (`fsdp2` gathers weights in the narrow dtype) makes this one step aside.
    """

    api = (1, 0)
    provides = ("precision",)
    per_unit = True

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        dtype = job.precision.param
        if dtype is job.precision.master:
            return None

        def apply(part: nn.Module) -> Applied:
            from ._precision import narrow

            return narrow(part, dtype)

        # After what replaces or adds layers, before recompute and compile take the forward passes over.
        return Transform(Phase.FLOAT8, "precision", apply, after=("fp8",), covers=("precision",), fallback=True)

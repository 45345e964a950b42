"""Plugins of a third party whose transforms are idle on one process: right, and wrong. As `two_ranks:Doubled`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_train import Phase, Plugin, Transform, hookimpl
from forge_train_kit.capabilities import KernelCapabilities

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Applied, Job


class Averaging(Plugin):
    """Whole copies on every rank, whose gradients are averaged after the last backward pass of a step."""

    api = (1, 0)
    layout = True
    provides = ("data_parallel",)
    factor = 1.0

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        if job.dist.world == 1:
            return None

        def apply(part: nn.Module) -> Applied:
            from forge_train import Applied

            def average() -> None:
                for parameter in part.parameters():
                    if parameter.grad is not None:
                        job.dist.all_reduce(parameter.grad, axis="data")
                        parameter.grad.mul_(self.factor / job.dist.layout.grad_average_size)

            names = tuple(name for name, _ in part.named_parameters())
            return Applied(part, names, after_backward=average)

        return Transform(Phase.SHARD, "data_parallel", apply, covers=("dp_shard", "dp_replicate"))


class Doubled(Averaging):
    """Its averaging factor is wrong, which no run on one process can show."""

    factor = 2.0


class Misfit(Averaging):
    """Matches nothing, as soon as there are two processes."""

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        from forge_train import Applied

        covers = ("dp_shard", "dp_replicate")
        return Transform(Phase.SHARD, "data_parallel", Applied, covers=covers) if job.dist.world > 1 else None


class OnlyCUDA(Plugin):
    """A kernel that no CPU has."""

    api = (1, 0)
    devices = ("cuda",)
    kernel_capabilities = KernelCapabilities(documents=True)

    @hookimpl
    def attention_kernel(self, job: Job) -> Any:
        raise AssertionError("called without a device")

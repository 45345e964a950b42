"""Fully sharded data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from forge_train import ConfigError, Phase, Plugin, Transform, hookimpl, section

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Applied, Job


class FSDP2(Plugin):
    """Shards weights, gradients and optimizer state over the data-parallel ranks (FSDP2; ZeRO, arXiv:1910.02054).

    Every unit that the model declares, its embedding and its head become one group each; the rest is a group of its
    own. A group is gathered in the dtype of `train.precision` while it computes; each rank keeps its share in fp32.
    With `parallel.dp_replicate` above 1, the ranks of `dp_shard` hold one copy together, and copies only exchange
    gradients (HSDP).
    """

    api = (1, 0)
    provides = ("data_parallel",)
    layout = True
    facts = {
        "memory.saves": ("parameters", "gradients", "optimizer"),
        "plan.per_unit": True,
        "plan.search": ("fsdp2.reduce=last", "fsdp2.reduce=each"),
    }

    @section
    class Config:
        reshard: Literal["always", "never", "step"] = "always"
        """Point at which gathered weights are dropped: after each forward and backward pass of a group (ZeRO-3), after
        the backward pass (ZeRO-2), or after the step's last one, so that weights are gathered once a step (as in
        ZeRO-1)."""
        reduce: Literal["last", "each"] = "last"
        """Micro-batches after which gradients are averaged: the step's last (whole gradients are kept until then), or
        each (more communication, but only this rank's share is kept)."""
        offload: bool = False
        """Keep weights, gradients and optimizer state in the host's memory; only on CUDA."""

    config: Config

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        if job.dist.layout.shard_average_size == 1:
            return None
        if self.config.offload and job.device.type != "cuda":
            raise ConfigError(f"fsdp2.offload moves weights off a CUDA device; this run's device is {job.device.type}.")

        def apply(part: nn.Module) -> Applied:
            from ._fsdp2 import Sharding, domain_mesh

            config = self.config
            sharding = Sharding(
                job,
                mesh_of=lambda domain: domain_mesh(job.dist, domain),
                reshard=config.reshard,
                reduce_each=config.reduce == "each",
                offload=config.offload,
            )
            return sharding.apply(part)

        return Transform(Phase.SHARD, "data_parallel", apply, covers=("dp_replicate", "dp_shard", "precision"))


class Zero1(Plugin):
    """Every data-parallel rank holds all weights during a step, and its share of the optimizer state (ZeRO stage 1).

    Weights are gathered once a step and gradients reduced once, which sends as much as `ddp`; between steps a rank
    keeps only its share, in fp32 (arXiv:1910.02054, §5.1). `dp_shard` and `dp_replicate` count alike: the shares are
    spread over all of them, and those of experts that `ep` spreads over the ranks that hold the same ones. It wins over
    `fsdp2` where the weights fit and many micro-batches are accumulated.
    """

    api = (1, 0)
    provides = ("data_parallel",)
    layout = True
    facts = {"memory.saves": ("optimizer",), "plan.per_unit": True, "plan.search": ("",)}

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        if job.dist.layout.shard_average_size == 1:
            return None

        def apply(part: nn.Module) -> Applied:
            from ._fsdp2 import Sharding, replica_mesh

            return Sharding(job, mesh_of=lambda domain: replica_mesh(job.dist, domain), reshard="step").apply(part)

        return Transform(Phase.SHARD, "data_parallel", apply, covers=("dp_replicate", "dp_shard", "precision"))

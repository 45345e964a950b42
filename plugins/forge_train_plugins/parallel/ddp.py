"""Replicated data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from forge_train import Gt, Phase, Plugin, Transform, hookimpl, section
from forge_train.base.errors import Problem

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Applied, Job
    from forge_train.config import Config as RunConfig


class DDP(Plugin):
    """Every rank holds the whole model; gradients are averaged in buckets during the backward pass.

    It wins over `fsdp2` where model, gradients and optimizer state fit into every rank's memory: a step sends each
    gradient once, whatever is accumulated, and gathers nothing (Li et al. 2020, arXiv:2006.15704). `dp_shard` and
    `dp_replicate` both count as replicas. It can't take weights that another technique has split, as `tp` does.
    """

    api = (1, 0)
    provides = ("data_parallel",)
    layout = True
    facts = {"plan.search": ("",)}

    @section
    class Config:
        bucket_mb: Annotated[float, Gt(0)] = 25.0
        """MiB of gradients that are averaged together."""

    config: Config

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if config.parallel.tp > 1:
            yield Problem(
                "parallel.tp", "ddp can't take weights that are split over tp ranks; use fsdp2 instead of ddp."
            )
        if config.parallel.ep > 1:
            yield Problem(
                "parallel.ep", "ddp can't take experts that are spread over ep ranks; use fsdp2 or zero1 instead."
            )

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        if job.dist.layout.shard_average_size == 1:
            return None

        def apply(part: nn.Module) -> Applied:
            from ._ddp import replicate

            return replicate(part, job.dist.mesh("dense", "dp_cp").get_group(), int(self.config.bucket_mb * 2**20))

        return Transform(Phase.SHARD, "data_parallel", apply, covers=("dp_replicate", "dp_shard"))

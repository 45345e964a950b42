"""Tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_train import ConfigError, Phase, Plugin, Problem, Transform, hookimpl, section

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Applied, Job, Span, SpanName
    from forge_train.config import Config as RunConfig


class TensorParallel(Plugin):
    """Tensor, sequence and loss parallelism, as the model's own plan says (arXiv:1909.08053, arXiv:2205.05198)."""

    api = (1, 0)
    layout = True
    provides = ("tp",)
    facts = {"plan.per_unit": True, "plan.search": ("",)}

    @section
    class Config:
        sequence_parallel: bool = True
        """Between blocks, split activations along the sequence instead of keeping them whole on every rank."""
        loss_parallel: bool = True
        """Compute the loss from logits that stay split over the vocabulary. Off, every rank gathers whole logits: for
        losses that are not built from torch's own cross-entropy."""
        async_tp: bool = False
        """Overlap collectives with matrix products (needs CUDA devices with symmetric memory, and `compile`)."""

    config: Config

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        if job.dist.layout.tp == 1:
            return None
        requires = ("compile",) if self.config.async_tp else ()
        return Transform(Phase.TENSOR, "tp", lambda part: self._apply(part, job), requires=requires, covers=("tp",))

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        if span not in ("forward_backward", "evaluate") or job.dist.layout.tp == 1 or not self.config.loss_parallel:
            return None
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if self.config.async_tp and config.parallel.tp > 1 and config.run.device in ("cpu", "mps"):
            yield Problem("tp.async_tp", f"needs CUDA devices with symmetric memory; this is {config.run.device!r}.")

    def _apply(self, part: nn.Module, job: Job) -> Applied:
        from ._tp.apply import apply, enable_async

        mesh = job.dist.mesh("dense", "tp")
        if self.config.async_tp:
            enable_async(job.device, mesh)
        train = job.config.train
        layout, length = job.dist.layout, train.sequence // job.dist.layout.cp
        if self.config.sequence_parallel and layout.pp > 1 and length % layout.tp:
            raise ConfigError(
                f"tp.sequence_parallel: the parts of a pipeline hand on equal pieces of sequences, and tp "
                f"({layout.tp}) does not divide {length} tokens; choose another train.sequence, or set it to false."
            )
        tokens = train.global_batch // job.dist.data_ranks * train.sequence // job.dist.layout.cp
        return apply(
            part,
            mesh,
            sequence_parallel=self.config.sequence_parallel,
            loss_parallel=self.config.loss_parallel,
            experts_apart=job.dist.layout.ep * job.dist.layout.etp > 1,
            size=tokens * job.precision.compute.itemsize,
            owner=job.hooks.owner,
        )

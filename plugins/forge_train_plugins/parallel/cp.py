"""Context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from forge_train import (
    BatchPhase,
    Ge,
    Phase,
    Plugin,
    PrepareBatch,
    Problem,
    Transform,
    hookimpl,
    section,
)
from forge_train_kit.capabilities import KernelCapabilities

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Applied, Batch, Job
    from forge_train.config import Config as RunConfig


class ContextParallel(Plugin):
    """Context parallelism: each rank holds a slice of every sequence, and attention sees whole sequences.

    Use it if the activations of a sequence do not fit on one rank, or if a batch has fewer sequences than ranks. All
    ranks get the same number of tokens of each row and about the same attention work. Each rank gets a chunk from the
    front and its mirror image from the end; if rows are packed documents, chunks are assigned by their attention work.
    A SHARD plugin such as `fsdp2` averages gradients and shards parameters over `cp` too. If a layer has a recurrence
    instead of a kernel (linear attention), ranks exchange heads, whatever `cp.method` says. A unit with
    neither, such as a state-space block, is refused.
    """

    api = (1, 0)
    layout = True
    provides = ("cp",)
    facts = {"plan.per_unit": True, "memory.saves": ("activations",), "plan.search": ("",)}

    @section
    class Config:
        method: Literal["auto", "gather", "ring", "ulysses", "ulysses_ring"] = "auto"
        """Exchange that gives attention whole sequences. `gather`: every rank gets all keys and values
        (arXiv:2407.21783, §3.3.2); sends few bytes if there are few key heads. `ulysses`: ranks exchange slices of all
        heads for whole sequences of some heads (arXiv:2309.14509); sends few bytes on many ranks; `cp` must divide the
        number of heads. `ring`: keys and values go around a ring in blocks (arXiv:2310.01889); needs the least memory,
        and a kernel with `blocks`. `ulysses_ring`: `ulysses` inside groups of ranks, `ring` between the groups. `auto`:
        chooses by the numbers of heads and the sequence length."""
        ulysses: Annotated[int, Ge(0)] = 0
        """With `ulysses_ring`, the number of ranks that exchange heads; 0 takes the largest possible number."""

    config: Config

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        ranks, length = config.parallel.cp, config.train.sequence
        if ranks > 1 and length % (2 * ranks):
            near = max(length // (2 * ranks), 1) * 2 * ranks
            yield Problem(
                "train.sequence",
                f"{length} tokens are no multiple of 2 × parallel.cp = {2 * ranks}: each rank has a chunk from the "
                f"front of a sequence and one from its end; {near} are.",
            )
        some = self.config.ulysses
        if some and self.config.method != "ulysses_ring":
            yield Problem("cp.ulysses", f"has no effect with cp.method = {self.config.method!r}.")
        elif some and ranks > 1 and (ranks % some or not 1 < some < ranks):
            yield Problem("cp.ulysses", f"{some} is no divisor of parallel.cp = {ranks} that is more than 1 and less.")

    @hookimpl
    def kernel_needs(self, config: RunConfig) -> KernelCapabilities | None:
        if config.parallel.cp == 1 or self.config.method == "ulysses":
            return None
        if "ring" in self.config.method:
            return KernelCapabilities(offsets=True, log_sum_exp=True, blocks=True)
        return KernelCapabilities(offsets=True)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch | None:
        ranks = job.dist.layout.cp
        if ranks == 1:
            return None
        rank = job.dist.mesh("dense", "cp").get_local_rank()

        def apply(batch: Batch) -> Batch:
            from ._cp.slices import sliced

            return sliced(batch, rank, ranks)

        return PrepareBatch(BatchPhase.SLICE, apply)

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        if job.dist.layout.cp == 1:
            return None

        def apply(part: nn.Module) -> Applied:
            from ._cp.apply import wrap

            return wrap(part, job, self.config.method, self.config.ulysses)

        return Transform(Phase.CONTEXT, "cp", apply, requires=("data_parallel",), covers=("cp",))

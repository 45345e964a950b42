"""One vector for each sequence, gathered over ranks; used by heads for texts, pairs and rewards."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from forge_train.contract.batch import TOKENS, Batch, BatchPhase, PrepareBatch

if TYPE_CHECKING:
    from forge_train.plugin.job import Job

Pooling = Literal["mean", "last", "cls"]
POOLING = "pooling"
"""The target that holds the weight of each position, `[batch, sequence]` fp32."""


MEMBER = "member"
"""The target that says which of its pair each row is, `[batch]` int64: 0 or 1, and -1 for rows that do not count. Where
rows hold several pairs, it is `[batch, answers]`, and -1 fills rows with fewer answers."""


def prepare_pooling(pooling: Pooling) -> PrepareBatch:
    """For `prepare_batch`: adds the target `pooling`, the weight of each position in the vector of its sequence.

    The text of a row is the document of its first token, or the whole row if there are no document ids. The weights are
    computed on whole sequences, so they stay correct when context parallelism cuts them afterwards.

    Args:
        pooling: `mean` of the text's tokens, its `last` token, or its first one (`cls`).
    """
    return PrepareBatch(BatchPhase.MASK, partial(_weigh, pooling))


def _weigh(pooling: Pooling, batch: Batch) -> Batch:
    ids = batch.document_ids
    text = torch.ones(batch.inputs.shape) if ids is None else (ids == ids[:, :1]).float()
    length = text.sum(1, keepdim=True)
    if pooling == "mean":
        weights = text / length
    else:
        place = torch.zeros_like(length) if pooling == "cls" else length - 1
        weights = (torch.arange(text.shape[1]) == place).float()
    return batch.with_targets({POOLING: weights}, TOKENS)


def pair_weights(batch: Batch) -> Tensor:
    """1 for each pair of rows 2i and 2i + 1, or of answers in a row, and 0 for padding, whose target `member` is -1;
    `[pairs]` fp32."""
    member = batch.targets.get(MEMBER)
    if member is None:
        return torch.ones(len(batch.inputs) // 2, device=batch.inputs.device)
    return (member.flatten()[0::2] >= 0).float()


def pool(values: Tensor, batch: Batch, job: Job) -> Tensor:
    """`[batch, sequence, features]` → `[batch, features]` fp32, by the target of `prepare_pooling`.

    Under context parallelism, every rank gets the vectors of whole sequences and propagates its part of the gradient.
    """
    return sum_of_slices((values.float() * batch.targets[POOLING].unsqueeze(-1)).sum(1), job)


def sum_of_slices(values: Tensor, job: Job) -> Tensor:
    """The sum over the ranks that hold slices of the same rows under context parallelism; differentiable.

    A gradient is the sum of the gradients from these ranks, each of which adds the same loss to the run's.
    """
    if job.dist.layout.cp == 1:
        return values
    return cast(Tensor, _Sum.apply(values, job.dist.mesh("dense", "cp").get_group()))  # type: ignore[no-untyped-call]


def gather_rows(rows: Tensor, job: Job) -> Tensor:
    """`[rows, features]` of each data-parallel rank → the rows of all ranks, in rank order; differentiable.

    A gradient is the sum of the gradients from all ranks, so the sum of the ranks' losses has the same gradient as the
    loss on one process. All ranks must have the same number of rows.
    """
    if job.dist.data_ranks == 1:
        return rows
    return cast(Tensor, _Gather.apply(rows, job.dist.mesh("batch", "dp").get_group()))  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = values.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.count = group, len(rows)
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, rows.contiguous(), group=group)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # gloo lacks autograd's form of reduce-scatter; vectors of texts are small compared with gradients of weights
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        start = dist.get_rank(ctx.group) * ctx.count
        return total[start : start + ctx.count], None

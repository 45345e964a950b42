"""One vector for each record, of values at its tokens: the last one's, or the mean of all."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from forge_train import Batch, Job
from forge_train_kit.model import full_tensor, sum_of_slices

from .batches import LAST, TEXT


def at_last(job: Job, values: Tensor, batch: Batch) -> Tensor:
    """`[batch, sequence, features]` → `[batch, features]` fp32, those of each record's last token.

    Args:
        job: the job of `forge infer`.
        values: of this rank's slice of the sequences; may be sharded over features.
        batch: that `forge infer` made.
    """
    return _weighted_sum(job, values, batch.targets[LAST])


def mean_of(job: Job, values: Tensor, batch: Batch) -> Tensor:
    """`[batch, sequence, features]` → `[batch, features]` fp32, the means over each record's tokens; see `at_last`."""
    text = batch.targets[TEXT]
    return _weighted_sum(job, values, text) / sum_of_slices(text.sum(1), job).clamp(min=1).unsqueeze(-1)


def _weighted_sum(job: Job, values: Tensor, weights: Tensor) -> Tensor:
    """The sum over the sequence, `[batch, features]`. Between layers, tensor parallelism may give each rank a piece of
    every sequence, the last of them filled up; the sum is that of all pieces."""
    values, pieces = full_tensor(values).float(), None
    if (length := values.shape[1]) != weights.shape[1]:
        pieces = job.dist.mesh("dense", "tp").get_group()
        padded = F.pad(weights, (0, length * dist.get_world_size(pieces) - weights.shape[1]))
        weights = padded.narrow(1, dist.get_rank(pieces) * length, length)
    each = weights.unsqueeze(-1)
    total = torch.where(each != 0, values * each, 0).sum(1)  # padding may hold anything
    if pieces is not None:
        dist.all_reduce(total, group=pieces)
    return sum_of_slices(total, job)

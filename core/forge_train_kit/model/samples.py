"""Values of the global batch's samples, gathered over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_train.base.errors import PluginError
from forge_train.contract.batch import TOKENS, Axes, Batch

if TYPE_CHECKING:
    from forge_train.plugin.job import Job


def gather_samples(values: Sequence[Tensor], job: Job, axes: Axes = TOKENS) -> Tensor:
    """Join what this rank has of its micro-batches to whole sequences of the global batch, in the order of the data.

    Every data-parallel and context-parallel rank of the pipeline stage must call it during a step. The result has no
    graph.

    Args:
        values: one for each of `job.step.batches`.
        axes: which of their axes are sequences and positions. A value without an axis of positions must be equal on
            context-parallel ranks.

    Raises:
        PluginError: if the values do not fit the micro-batches, or context-parallel ranks differ.
    """
    batches, rows = job.step.batches, axes.batch
    if rows is None or len(values) != len(batches):
        raise PluginError(
            f"gather_samples takes a value with an axis of sequences for each of the step's {len(batches)} "
            f"micro-batches (job.step.batches), found {len(values)} with {axes}."
        )
    pairs = zip(values, batches, strict=True)
    own = torch.cat([_whole(value.detach(), batch, job, axes, rows) for value, batch in pairs], rows)
    ids = torch.cat([batch.sample_ids for batch in batches if batch.sample_ids is not None])
    order = torch.cat(job.dist.gather_tensors(ids, "dp")).argsort()
    return torch.cat(job.dist.gather_tensors(own, "dp"), rows).index_select(rows, order)


def _whole(value: Tensor, batch: Batch, job: Job, axes: Axes, rows: int) -> Tensor:
    """A micro-batch's value for whole sequences."""
    for dim, size in ((rows, batch.inputs.shape[0]), (axes.sequence, batch.inputs.shape[1])):
        if dim is not None and value.shape[dim] != size:
            raise PluginError(
                f"gather_samples: a value is {list(value.shape)}, and must have {axes} of a micro-batch that is "
                f"{list(batch.inputs.shape)}."
            )
    if batch.positions is None:
        return value
    pieces = job.dist.gather_tensors(value, "cp")
    if axes.sequence is None:
        if not all(torch.equal(piece, pieces[0]) for piece in pieces):
            raise PluginError(
                "gather_samples: context-parallel ranks differ in a value without an axis of positions; reduce it "
                'over axis "cp" first.'
            )
        return value
    places = torch.cat(job.dist.gather_tensors(batch.positions, "cp"))
    return torch.cat(pieces, axes.sequence).index_select(axes.sequence, places.argsort())

"""Values of micro-batches, joined to whole sequences of the global batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_train import Axes, Batch, CurrentStep, PluginError
from forge_train_kit.model import gather_samples

pytestmark = [pytest.mark.unit]

WHOLE = torch.arange(24).view(4, 6)
"""Rows of two micro-batches of each of two data-parallel ranks; a rank has the first and the third, or the others."""


class Ranks:
    """Two ranks along each axis: what one gives is known from what the other has."""

    def __init__(self, **others: Any) -> None:
        self.others = others

    def gather_tensors(self, tensor: Tensor, axis: str) -> list[Tensor]:
        other = self.others.get(axis)
        return [tensor] if other is None else [tensor, other(tensor)]


def job(batches: list[Batch], **others: Any) -> Any:
    return SimpleNamespace(step=CurrentStep(batches), dist=Ranks(**others))


def rows(*numbers: int) -> Batch:
    ids = WHOLE[list(numbers)]
    return Batch(ids, ids, sample_ids=torch.tensor(numbers))


def test_rows_of_all_ranks_are_in_the_order_of_the_data() -> None:
    found = gather_samples(
        [WHOLE[:1], WHOLE[2:3]],
        job([rows(0), rows(2)], dp=lambda own: own + (6 if own.dim() > 1 else 1)),
    )
    assert torch.equal(found, WHOLE)


def test_slices_are_put_where_their_positions_lie_and_have_no_graph() -> None:
    batch = rows(0, 1).slice("sequence", (0, 1), (4, 6))
    other = torch.tensor([1, 2, 3])

    def others(own: Tensor) -> Tensor:
        return other if own.dtype == torch.int64 else WHOLE[:2, other].float()

    mine = batch.inputs.float().requires_grad_()
    found = gather_samples([mine], job([batch], cp=others))
    assert torch.equal(found, WHOLE[:2].float())
    assert not found.requires_grad
    turned = gather_samples(
        [mine.T],
        job([batch], cp=lambda own: other if own.dtype == torch.int64 else others(own).T),
        Axes(batch=1, sequence=0),
    )
    assert torch.equal(turned, WHOLE[:2].float().T)


def test_values_that_do_not_fit_are_refused() -> None:
    batch = rows(0, 1).slice("sequence", (0, 3))
    here = job([batch], cp=lambda own: own + 1)
    with pytest.raises(PluginError, match=r"context-parallel ranks differ in a value without an axis of positions"):
        gather_samples([torch.ones(2)], here, Axes(batch=0))
    with pytest.raises(PluginError, match=r"a value is \[2, 6\], and .* of a micro-batch that is \[2, 3\]"):
        gather_samples([WHOLE[:2]], here)
    with pytest.raises(PluginError, match=r"each of the step's 1 micro-batches \(job\.step\.batches\), found 0"):
        gather_samples([], here)
    with pytest.raises(PluginError, match=r"with an axis of sequences .* found 1 with Axes\(batch=None"):
        gather_samples([torch.ones(())], here, Axes(batch=None))

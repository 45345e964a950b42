"""The items that each token attends to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from forge_train import Axes, Batch
from forge_train_kit.modalities import extras_of


def ranges_of(name: str) -> str:
    """The extra of a modality with the items of its row that each token attends to, `[batch, sequence, 2]`: the first
    one, and the one after the last."""
    return f"{name}_range"


def with_ranges(batch: Batch, names: Iterable[str], attend: str) -> Batch:
    """The batch with the ranges of modalities, from whole rows: a slice does not have the placeholders before it.

    Args:
        batch: before it is cut.
        names: of modalities.
        attend: items that a token attends to: all, last or run.
    """
    places = {name: extras_of(name)[2] for name in names}
    made = {
        ranges_of(name): item_ranges(batch.extras[extra], batch.document_ids, attend)
        for name, extra in places.items()
        if extra in batch.extras
    }
    axes = dict.fromkeys(made, Axes(batch=0, sequence=1))
    return replace(batch, extras={**batch.extras, **made}, axes={**batch.axes, **axes})


def item_ranges(places: Tensor, document_ids: Tensor | None, attend: str) -> Tensor:
    """Ranges of items, `[batch, sequence, 2]` int64; both ends are equal where a token has none.

    Args:
        places: the item whose placeholder stands at each position, −1 elsewhere: `[batch, sequence]`, of whole rows.
        document_ids: as in a batch; None for rows of one document.
        attend: items that a token attends to: all, last or run.
    """
    until = (places + 1).cummax(1).values
    begins = torch.zeros_like(places, dtype=torch.bool)
    if document_ids is not None:
        begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    before = torch.where(begins, until.roll(1, 1), 0).cummax(1).values
    first = until - 1
    if attend == "run":
        alone = places >= 0
        alone[:, 1:] &= (places[:, :-1] < 0) | begins[:, 1:]
        first = torch.where(alone, places, -1).cummax(1).values
    return torch.stack([before if attend == "all" else torch.maximum(before, first), until], -1)

"""The tokens that follow: the inputs and the labels of each module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from forge_train import MASKED, Axes, Batch, PluginError, PrepareStep, StateKey

IDS: StateKey[Tensor] = StateKey("mtp.ids", Axes(batch=0, sequence=1))
"""`[batch, sequence, depths]` int64: the tokens 1, 2, … after each position."""
LABELS: StateKey[Tensor] = StateKey("mtp.labels", Axes(batch=0, sequence=1))
"""Of the same shape: the tokens after those, or −100."""


def look_ahead(depths: int) -> PrepareStep:
    """Writes both to each micro-batch's state before sequences are cut: the next tokens may be on another rank."""
    return PrepareStep(partial(_write, depths))


def _write(depths: int, batches: Sequence[Batch]) -> None:
    for batch in batches:
        if batch.labels.shape != batch.inputs.shape:
            raise PluginError(
                f"mtp predicts tokens: it needs a label for each of the {list(batch.inputs.shape)} input tokens, found "
                f"labels of {list(batch.labels.shape)}."
            )
        both = [following(batch, depth) for depth in range(1, depths + 1)]
        batch.state[IDS] = torch.stack([ids for ids, _ in both], dim=-1)
        batch.state[LABELS] = torch.stack([labels for _, labels in both], dim=-1)


def following(batch: Batch, by: int) -> tuple[Tensor, Tensor]:
    """The token `by` positions later, and its label, which is masked in another document and beyond the row."""
    ids, labels = torch.zeros_like(batch.inputs), torch.full_like(batch.labels, MASKED)
    ids[:, :-by], labels[:, :-by] = batch.inputs[:, by:], batch.labels[:, by:]
    if batch.document_ids is not None:
        apart = batch.document_ids[:, by:] != batch.document_ids[:, :-by]
        labels[:, :-by].masked_fill_(apart, MASKED)
    return ids, labels

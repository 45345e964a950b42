"""The tokens that follow: the inputs and the labels of each module."""

from __future__ import annotations

import torch
from torch import Tensor

from forge_train import MASKED, Axes, Batch, PluginError, PrepareStep

IDS = "mtp.ids"
"""Target: `[batch, sequence, depths]` int64: the tokens 1, 2, … after each position."""
LABELS = "mtp.labels"
"""Target of the same shape: the tokens after those, or −100."""


def look_ahead(depths: int) -> PrepareStep:
    """Adds both to each micro-batch before sequences are cut: the next tokens may be on another rank."""
    return PrepareStep(lambda batches: [_with_following(batch, depths) for batch in batches])


def _with_following(batch: Batch, depths: int) -> Batch:
    if batch.labels.shape != batch.inputs.shape:
        raise PluginError(
            f"mtp predicts tokens: it needs a label for each of the {list(batch.inputs.shape)} input tokens, found "
            f"labels of {list(batch.labels.shape)}."
        )
    ids, labels = zip(*(following(batch, depth) for depth in range(1, depths + 1)), strict=True)
    return batch.with_targets({IDS: torch.stack(ids, -1), LABELS: torch.stack(labels, -1)}, Axes(batch=0, sequence=1))


def following(batch: Batch, by: int) -> tuple[Tensor, Tensor]:
    """The token `by` positions later, and its label, which is masked in another document and beyond the row."""
    ids, labels = torch.zeros_like(batch.inputs), torch.full_like(batch.labels, MASKED)
    ids[:, :-by], labels[:, :-by] = batch.inputs[:, by:], batch.labels[:, by:]
    if batch.document_ids is not None:
        apart = batch.document_ids[:, by:] != batch.document_ids[:, :-by]
        labels[:, :-by].masked_fill_(apart, MASKED)
    return ids, labels

"""A batch of feedback, and beside it the same prompts with answers of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forge_train.contract.batch import TOKENS, Axes, Batch

DESIRABLE = "desirable"
"""The target that is 1 in rows with a desirable answer and 0 in those with an undesirable one, `[batch]` int64; -1 in
rows that do not count."""
MISMATCHED = "mismatched"
"""The target that only a batch of such answers has, 0-dim."""
_PREFIX = f"{MISMATCHED}."
_FIELDS = ("inputs", "labels", "position_ids", "document_ids")


def with_mismatched(batch: Batch, other: Batch) -> Batch:
    """A batch that carries another one of its shape, which has document and position ids, in its targets."""
    found = {f"{_PREFIX}{name}": tensor for name, tensor in other.tensors().items() if name in _FIELDS}
    return batch.with_targets(found, TOKENS)


def split_mismatched(batch: Batch) -> tuple[Batch, ...]:
    """The batch alone, and the one that it carries, whose rows count where its own do; the batch if it carries none."""
    carried = {name: tensor for name, tensor in batch.targets.items() if name.startswith(_PREFIX)}
    if not carried:
        return (batch,)
    targets = {name: tensor for name, tensor in batch.targets.items() if name not in carried}
    axes = {name: one for name, one in batch.axes.items() if name not in carried}
    other: dict[str, Any] = {name.removeprefix(_PREFIX): tensor for name, tensor in carried.items()}
    apart = Batch(**other, targets={DESIRABLE: batch.targets[DESIRABLE]})
    mark = {MISMATCHED: batch.inputs.new_ones(())}
    return replace(batch, targets=targets, axes=axes), apart.with_targets(mark, Axes(batch=None))

"""Losses: what a loss function may offer, and what tasks call it by. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, cast

from forge_train.base.errors import ConfigError
from forge_train.contract.batch import MASKED
from forge_train.contract.protocols import Scalar

from .scoped import ScopedValue

__all__ = [
    "ANSWERS",
    "LABEL_WEIGHTS",
    "LossFunction",
    "RowLosses",
    "WeightedLosses",
    "batch_loss",
    "batch_weight",
    "losses_told_to",
]

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_train.contract.batch import Batch

LABEL_WEIGHTS = "label_weights"
"""Target with the weight of each label's loss, `[batch, sequence]` float32; without it, each counts 1."""
ANSWERS = "answers"
"""Target with the number that each token's answer has in its row, `[batch, sequence]` int64, where rows hold several
answers; padding has the number after the last."""

Listener = Callable[["Batch", "Tensor"], None]

_listeners: ScopedValue[tuple[Listener, ...]] = ScopedValue(())


class LossFunction(Protocol):
    """`loss`: sum of the losses of the unmasked positions, a 0-dim float32 tensor.

    `hidden [batch, sequence, dim]`; `labels` as the task gives them, `[batch, sequence]` for token ids. It calls `head`
    as a module, on whole or on chunks of `hidden`, and never touches its weights: they may be sharded.
    """

    def __call__(self, hidden: Tensor, head: nn.Module, labels: Tensor) -> Scalar: ...


class RowLosses(Protocol):
    """A loss function that can tell the loss of each sequence; it need not."""

    def by_row(self, hidden: Tensor, head: nn.Module, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `__call__`, bit for bit, and each sequence's summed loss, `[batch]`, without a graph."""
        ...


class WeightedLosses(Protocol):
    """A loss function that can multiply the loss of each label by its weight; it need not."""

    def weighted(self, hidden: Tensor, head: nn.Module, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the weighted losses, and that of each sequence, `[batch]`, without a graph."""
        ...


def batch_weight(batch: Batch) -> int | float:
    """The number of unmasked labels, or the sum of their weights if it has some: for `Task.weight`."""
    kept, weights = batch.labels != MASKED, batch.targets.get(LABEL_WEIGHTS)
    return int(kept.sum()) if weights is None else float((weights.double() * kept).sum())


def batch_loss(function: LossFunction, hidden: Tensor, head: nn.Module, batch: Batch) -> Tensor:
    """A batch's summed loss, for `Task.loss`; listeners receive each sequence's loss.

    Raises:
        ConfigError: labels have weights, and the function can't take them.
    """
    # A guarded function has these through __getattr__, which isinstance does not ask since Python 3.12.
    by_row, weighted = getattr(function, "by_row", None), getattr(function, "weighted", None)
    if (weights := batch.targets.get(LABEL_WEIGHTS)) is not None:
        if weighted is None:
            raise ConfigError("The loss plugin can't weigh labels, and the data has weights other than 0 and 1.")
        loss, rows = weighted(hidden, head, batch.labels, weights)
    elif not _listeners.value or by_row is None:
        return function(hidden, head, batch.labels)
    else:
        loss, rows = by_row(hidden, head, batch.labels)
    for listener in _listeners.value:
        listener(batch, rows)
    return cast("Tensor", loss)


def losses_told_to(listener: Listener) -> AbstractContextManager[None]:
    """Tell each batch of the block, and the summed loss of each of its sequences, `[batch]`.

    The listener reads no value on the host. It hears of tasks that use `batch_loss`, with a loss that is `RowLosses`.
    """
    return _listeners.set_to((*_listeners.value, listener))

"""The loss of each sequence, told to whoever listens while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .batch import Batch
    from .protocols import LossFunction

Listener = Callable[["Batch", "Tensor"], None]

_listeners: tuple[Listener, ...] = ()


@runtime_checkable
class RowLosses(Protocol):
    """A loss function that can tell the loss of each sequence; it need not."""

    def by_row(self, hidden: Tensor, head: nn.Module, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `__call__`, bit for bit, and each sequence's summed loss, `[batch]`, without a graph."""
        ...


def batch_loss(function: LossFunction, hidden: Tensor, head: nn.Module, batch: Batch) -> Tensor:
    """A batch's summed loss, for `Task.loss`: that of each sequence is told to those who listen."""
    if not _listeners or not isinstance(function, RowLosses):
        return function(hidden, head, batch.labels)
    loss, rows = function.by_row(hidden, head, batch.labels)
    for listener in _listeners:
        listener(batch, rows)
    return loss


@contextmanager
def losses_told_to(listener: Listener) -> Iterator[None]:
    """Tell each batch of the block, and the summed loss of each of its sequences, `[batch]`.

    The listener reads no value on the host. It hears of tasks that use `batch_loss`, with a loss that is `RowLosses`.
    """
    global _listeners  # noqa: PLW0603  # a step has one, as it has one scale of attached losses
    before, _listeners = _listeners, (*_listeners, listener)
    try:
        yield
    finally:
        _listeners = before

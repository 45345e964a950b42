"""The hook by which plugins say how uncertain a model is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from forge_train import Batch, Job, hookspec

if TYPE_CHECKING:
    from torch import Tensor, nn


class Uncertainty(Protocol):
    """How uncertain the model is of each next token: `[batch, sequence]`, from 0 to 1."""

    def __call__(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor: ...


@hookspec("questions", used_later=True, asked="start")
def uncertainty(job: Job) -> Uncertainty | None:
    """A measure of the model's uncertainty."""
    raise AssertionError

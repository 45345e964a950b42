"""Metrics: numbers that accumulate on the device and are added up over ranks when they are logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bins:
    """A histogram, as trackers draw it."""

    edges: tuple[float, ...]
    """One more than there are bins, ascending."""
    counts: tuple[float, ...]


Value: TypeAlias = "float | Mapping[str, float] | Bins"


class Metric:
    """A number over many batches and all ranks. `forge_train_kit.metrics` has the usual ones.

    Its state is two float64 tensors that its own `update` changes on the device: `sums` are added over ranks, of
    `maxima` the largest is taken (a minimum is the negative of a maximum). Nothing else may be kept, and `update` reads
    no value on the host. A state that was never changed is "nothing observed" and is not logged.

    Args:
        sums: how many numbers are added up; they start at 0.
        maxima: of how many numbers the largest is kept; they start at −∞.
    """

    sums: Tensor
    maxima: Tensor
    timing: bool = False
    """True if it differs from run to run, as timings do."""
    per_rank: bool = False
    """True if each rank observes something of its own, such as its shards of parameters or its memory: states are
    summed over all ranks. Otherwise ranks that see the same data (under tensor parallelism) are counted once."""

    def __init__(self, sums: int = 0, maxima: int = 0) -> None:
        import torch

        self.sums = torch.zeros(sums, dtype=torch.float64)
        self.maxima = torch.full((maxima,), -torch.inf, dtype=torch.float64)

    def value(self, sums: Tensor, maxima: Tensor) -> Value:
        """The result over everything that was observed, from the state of all ranks together, on the CPU.

        Several results are a mapping from names to numbers.
        """
        raise NotImplementedError

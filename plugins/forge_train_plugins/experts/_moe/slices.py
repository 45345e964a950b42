"""Combines tokens of one micro-batch that are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_train_kit.model import rows_are_whole

if TYPE_CHECKING:
    from forge_train import Job

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Slices:
    """The other ranks that work on this rank's micro-batch.

    Args:
        groups: returns the groups of ranks over which its tokens are spread, from outer to inner.
        sizes: returns the sizes of these groups.
        copies: number of ranks with the same tokens, each of which computes a part of the output's sum.
    """

    groups: Callable[[], list[Any]]
    sizes: Callable[[], tuple[int, ...]]
    copies: int

    @classmethod
    def of(cls, job: Job) -> Slices:
        """Context parallelism spreads tokens unless rows are whole, and tensor parallelism unless experts are split."""
        layout, dist = job.dist.layout, job.dist
        whole = layout.etp == 1

        def axes() -> list[str]:
            spread = ("cp", not rows_are_whole()), ("tp", whole)
            return [axis for axis, spreads in spread if spreads and getattr(layout, axis) > 1]

        def groups() -> list[Any]:
            return [dist.mesh("dense", axis).get_group() for axis in axes()]

        return cls(groups, lambda: tuple(getattr(layout, axis) for axis in axes()), 1 if whole else layout.tp)

    @property
    def count(self) -> int:
        """Number of slices of a micro-batch."""
        return torch.Size(self.sizes()).numel()

    @property
    def summed(self) -> bool:
        """True if this rank's output is one term of a sum."""
        return self.copies > 1

    def add(self, x: Tensor) -> Tensor:
        """The sum over all slices, without gradients."""
        for group in self.groups():
            x = _ops.wait_tensor(_ops.all_reduce(x, "sum", group.group_name))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' rows, concatenated, without gradients."""
        for group in reversed(self.groups()):
            x = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
        return x

    def in_order(self, x: Tensor, batch: int) -> Tensor:
        """The result of `gather`, rearranged sequence by sequence, for this number of sequences."""
        return x.view(self.count, batch, -1, x.shape[-1]).transpose(0, 1).reshape(len(x), -1)

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of a result of `gather`."""
        for group in self.groups():
            x = x.chunk(group.size())[group.rank()]
        return x

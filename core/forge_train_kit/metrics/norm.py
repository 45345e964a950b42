"""Norms of tensors that lie on the ranks in parts."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from forge_train.contract.events import Metric
from forge_train.mesh.tensors import full_tensor, local
from forge_train.plugin.job import Job


class Norm(Metric):
    """The 2-norm of parameters, or of what lies on the ranks as parameters do: gradients, an optimizer's state.

    Each element counts once, however tensors are sharded or replicated. Those of several updates count together.

    Args:
        job: whose ranks hold them.
    """

    per_rank = True

    def __init__(self, job: Job) -> None:
        super().__init__(sums=2)
        self._ranks = job.dist.world // job.dist.layout.pp

    @torch.no_grad()
    def update(self, tensors: Iterable[Tensor]) -> None:
        """Plain tensors and DTensors. Partial ones are summed over ranks here, so all ranks call this."""
        for tensor in tensors:
            partial = any(placement.is_partial() for placement in getattr(tensor, "placements", ()))
            whole = full_tensor(tensor) if partial else tensor
            norm = torch.linalg.vector_norm(local(whole).detach(), dtype=torch.float64)
            share = 1.0 if self._ranks == 1 else _shards(whole) / self._ranks
            self.sums[0].add_(norm.square(), alpha=share)
            self.sums[1].add_(1)  # so that a norm of zero is something observed

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        return math.sqrt(float(sums[0]))


def _shards(tensor: Tensor) -> int:
    """Into how many parts a tensor is split; a plain one is replicated on all ranks of its stage."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return 1
    placements = enumerate(tensor.placements)  # type: ignore[attr-defined]
    return math.prod(mesh.size(axis) for axis, placement in placements if not placement.is_replicate())

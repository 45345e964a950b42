"""The global gradient norm, and clipping by it, over parameters of any placement."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh.distributed import DistributedContext
from ..mesh.tensors import full_tensor, local, scale


def total_norm(
    gradients: Sequence[Tensor], context: DistributedContext, norms: list[tuple[list[int], Tensor]] | None = None
) -> Tensor:
    """The 2-norm of all gradients together, 0-dim float32 and bit-equal on all ranks, without waiting for the device.

    Each rank sums the squares of what it holds; the sums are added up over the mesh axes that the gradients are split
    along, those of one mesh together, and over the stages of a pipeline. torch's own total norm (2.13) fails for plain
    tensors beside DTensors, and for two meshes.

    Args:
        gradients: of any placement.
        context: of the processes.
        norms: is given the norms of what this rank holds, as `Update.norms`.
    """
    from torch.distributed.tensor import DTensor, Partial

    groups: dict[tuple[object, tuple[int, ...]], list[tuple[int, Tensor]]] = {}
    for place, gradient in enumerate(gradients):
        if not isinstance(gradient, DTensor):
            groups.setdefault((None, ()), []).append((place, gradient))
            continue
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            groups.setdefault((None, ()), []).append((place, full_tensor(gradient)))
            continue
        split = tuple(
            axis
            for axis, placement in enumerate(gradient.placements)
            if not placement.is_replicate() and gradient.device_mesh.size(axis) > 1
        )
        groups.setdefault((gradient.device_mesh if split else None, split), []).append((place, local(gradient)))
    total = torch.zeros((), device=context.device)
    for (mesh, split), tensors in groups.items():
        held = _norms([tensor for _, tensor in tensors])
        if norms is not None:
            norms.append(([place for place, _ in tensors], held))
        square = torch.linalg.vector_norm(held).to(context.device, torch.float32) ** 2
        for axis in split:
            dist.all_reduce(square, group=mesh.get_group(axis))  # type: ignore[attr-defined]
        total += square
    for name in context.layout.dividing("layers"):
        context.all_reduce(total, axis=name)
    return total.sqrt()


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each tensor, on the device of the first; summed in fp32 where it is narrower."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
    norms: dict[int, Tensor] = {}
    for (_, dtype), places in kinds.items():
        wide = torch.float32 if dtype.itemsize < 4 else None
        norms |= zip(places, torch._foreach_norm([tensors[place] for place in places], 2.0, dtype=wide), strict=True)
    return torch.stack([norms[place].to(tensors[0].device) for place in range(len(tensors))])


def clip(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients in place so that their norm is at most `limit`."""
    scale(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))

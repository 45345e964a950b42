"""The global gradient norm, and clipping by it, over parameters of any placement."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..ground.tensors import full_tensor, local, scale
from ..processes.distributed import DistributedContext


def total_norm(gradients: Sequence[Tensor], context: DistributedContext) -> Tensor:
    """The 2-norm of all gradients together, 0-dim float32 and bit-equal on all ranks, without waiting for the device.

    Each rank sums the squares of what it holds; the sums are added up over the mesh axes that the gradients are split
    along, those of one mesh together, and over the stages of a pipeline. torch's own total norm (2.13) fails for plain
    tensors beside DTensors, and for two meshes.
    """
    from torch.distributed.tensor import DTensor, Partial

    groups: dict[tuple[object, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            groups.setdefault((None, ()), []).append(gradient)
            continue
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            gradient = full_tensor(gradient)
            groups.setdefault((None, ()), []).append(gradient)
            continue
        split = tuple(
            axis
            for axis, placement in enumerate(gradient.placements)
            if not placement.is_replicate() and gradient.device_mesh.size(axis) > 1
        )
        groups.setdefault((gradient.device_mesh if split else None, split), []).append(local(gradient))
    total = torch.zeros((), device=context.device)
    for (mesh, split), tensors in groups.items():
        wide = [tensor.float() if tensor.dtype is torch.bfloat16 else tensor for tensor in tensors]
        square = torch.nn.utils.get_total_norm(wide).to(context.device, torch.float32) ** 2
        for axis in split:
            dist.all_reduce(square, group=mesh.get_group(axis))  # type: ignore[attr-defined]
        total += square
    if context.layout.pp > 1:
        context.all_reduce(total, axis="pp")
    return total.sqrt()


def clip(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients in place so that their norm is at most `limit`."""
    scale(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))

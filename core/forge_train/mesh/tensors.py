"""Tensors of any placement: the local part, the full tensor, gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_HOST = "_forge_on_host"


def remember_host(moved: Tensor, host: Tensor) -> None:
    """Keep the tensor that another one was copied from, for whoever would have to wait for its values."""
    if moved is not host and not (moved.is_inference() or host.is_inference()):  # which count no changes
        setattr(moved, _HOST, (host, host._version, moved._version))


def on_host(tensor: Tensor) -> Tensor:
    """The tensor on the CPU that this one was copied from, if neither was changed since; else the tensor itself."""
    host, *versions = getattr(tensor, _HOST, (None,))
    return host if host is not None and [host._version, tensor._version] == versions else tensor


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor, with gradients; anything else as it is. torch.compile sees through it."""
    if type(tensor) in (Tensor, nn.Parameter):  # one process need not import torch.distributed.tensor (0.9 s)
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def window(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """The range of each axis of a tensor that this rank's part covers: from, up to."""
    if not hasattr(tensor, "device_mesh"):
        return tuple((0, size) for size in tensor.shape)
    # DTensor's own `__create_chunk_list__` (torch 2.13) gives the same, and imports all of its checkpoints.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements: Any = tensor.placements  # type: ignore[attr-defined]
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    return tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def full_tensor(tensor: Tensor) -> Tensor:
    """A DTensor gathered on every rank, with gradients; any other tensor as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def held(tensor: Tensor) -> list[Tensor]:
    """This rank's part of a tensor, or the tensors that it is made of."""
    part = local(tensor)
    names = part.__tensor_flatten__()[0] if hasattr(part, "__tensor_flatten__") else ()
    return [one for name in names for one in held(getattr(part, name))] or [part]


@torch.no_grad()
def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return how many bytes of some tensors this rank holds."""
    return sum(part.numel() * part.element_size() for one in tensors if one is not None for part in held(one))


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def scale(gradients: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply gradients in place: plain tensors and DTensors of any mesh together, on one device or several."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        held = local(gradient)
        by_device.setdefault(held.device, []).append(held)
    for device, tensors in by_device.items():
        torch._foreach_mul_(tensors, factor.to(device) if isinstance(factor, Tensor) else factor)

"""Stochastic rounding to bf16, with random bits that are the same on every device and layout and use no generator."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._triton import has_triton

from forge_train.mesh.tensors import local


def rounded(values: Tensor, *key: object) -> Tensor:
    """fp32 → bf16, rounded up or down with probabilities that make the expectation exact; non-finite values stay so.

    Args:
        values: a tensor, or a DTensor whose shards are rounded like the whole tensor.
        key: determines the random bits, together with an element's place: seed, step, name, …
    """
    return shards(rounded_at(local(values), places(values), *key), values)


def rounded_at(part: Tensor, places: Tensor, *key: object) -> Tensor:
    """The same for any part of a tensor, given the places of its elements."""
    return fused(_rounded, part)(part.contiguous(), places, *numbers(key))


def _rounded(part: Tensor, places: Tensor, factor: int, offset: int) -> Tensor:
    exact = part.view(torch.int32)
    up = (bits(places, factor, offset) >> 16) & 0xFFFF
    kept = torch.where(part.isfinite(), (exact + up) & ~0xFFFF, exact)
    return kept.view(torch.float32).to(torch.bfloat16)


def shards(part: Tensor, like: Any, row: int | None = None, cut: Sequence[int] = ()) -> Tensor:
    """This rank's part of a tensor that is sharded like another one.

    Args:
        part: the local part.
        like: the other tensor, or a plain tensor, which this rank has in full.
        row: size of the whole's last dimension, if it differs from `like`'s.
        cut: axes of the mesh along which all ranks have the same part instead.
    """
    if not hasattr(like, "device_mesh"):
        return part
    from torch.distributed.tensor import DTensor

    shape = (*like.shape[:-1], like.shape[-1] if row is None else row) if like.dim() else ()
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    placements = spread(like, cut)
    return DTensor.from_local(
        part, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def spread(like: Any, cut: Sequence[int]) -> list[Any]:
    """Placements of a tensor that belongs to another one and is replicated along some axes of the mesh."""
    from torch.distributed.tensor import Replicate

    return [Replicate() if axis in cut else one for axis, one in enumerate(like.placements)]


def offsets(tensor: Any) -> tuple[int, ...]:
    """The place of the first local element in each dimension."""
    if not hasattr(tensor, "device_mesh"):
        return (0,) * len(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    with _disable_current_modes():  # it reads values, which fake tensors lack
        _, found = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(found)


def places(tensor: Any) -> Tensor:
    """The index of each local element, counted over the whole tensor."""
    return places_of(local(tensor).shape, offsets(tensor), tensor.shape, tensor.device)


def places_of(sizes: Sequence[int], first: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """The same for a part with these sizes, whose first element is at `first` in a tensor of this shape."""
    place, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for size, offset, whole in zip(reversed(sizes), reversed(first), reversed(shape), strict=True):
        along = torch.arange(offset, offset + size, device=device) * stride
        place = along.view(-1, *[1] * place.dim()) + place
        stride *= whole
    return place


def bits(places: Tensor, factor: int, offset: int) -> Tensor:
    """32 random bits for each place, int32: a multiplication by an odd number, then a 32-bit hash (Wellons 2018,
    “Prospecting for Hash Functions”). A key determines the numbers."""
    x = (places & 0x7FFFFFFF).to(torch.int32) * factor + offset  # int32 wraps around, as the hash wants it
    for shift, prime in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ _shifted(x, shift)) * prime
    return x ^ _shifted(x, 15)


def _shifted(x: Tensor, count: int) -> Tensor:
    """To the right, with zeros from the left: torch fills up with the sign."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def numbers(key: Sequence[object]) -> tuple[int, int]:
    """An odd factor below 2³¹, and an int32."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") >> 1 | 1, int.from_bytes(digest[4:], "little", signed=True)


def fused(function: Callable[..., Tensor], beside: Tensor) -> Callable[..., Tensor]:
    """A function as one kernel, where the device has a compiler for it: eagerly, each of some twenty operations reads
    and writes all elements."""
    return _compiled(function) if type(beside) is Tensor and _can_fuse(beside.device.type) else function


@cache
def _can_fuse(device: str) -> bool:
    return device == "cuda" and has_triton()


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Shapes are symbols, and the key's numbers tensors, so that no step and no tensor is compiled anew.
    compiled = torch.compile(function, dynamic=True, fullgraph=True)

    def run(part: Tensor, *given: Any) -> Tensor:
        # A number that is a symbol has 64 bits in a kernel: products would not wrap around.
        numbers = (torch.full((), one, dtype=torch.int32, device=part.device) for one in given if isinstance(one, int))
        return compiled(part, *(next(numbers) if isinstance(one, int) else one for one in given))

    return run

"""Stochastic rounding to bf16, with random bits that depend on no device, no layout and no generator."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..ground.tensors import local

MASK = 0xFFFFFFFF


def rounded(values: Tensor, *key: object) -> Tensor:
    """fp32 → bf16, up or down with probabilities that make the expectation exact; what is not finite stays so.

    Args:
        values: a tensor, or a DTensor whose shards are rounded as the whole one is.
        key: what the random bits are a function of, beside the place of an element: seed, step, name, …
    """
    piece = local(values).contiguous()
    bits = piece.view(torch.int32)
    up = (_random(_places(values), *key) >> 16).to(torch.int32)
    kept = torch.where(piece.isfinite(), (bits + up) & ~0xFFFF, bits)
    narrow = kept.view(torch.float32).to(torch.bfloat16)
    if piece is values or not hasattr(values, "device_mesh"):
        return narrow
    from torch.distributed.tensor import DTensor

    mesh, places = values.device_mesh, values.placements  # type: ignore[attr-defined]
    return DTensor.from_local(narrow, mesh, places, run_check=False, shape=values.shape, stride=values.stride())


def _places(tensor: Any) -> Tensor:
    """The index of each element that lies here, counted over the whole tensor."""
    sizes, offsets = local(tensor).shape, (0,) * tensor.dim()
    if hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        with _disable_current_modes():  # it reads values, which fake tensors lack
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    place, stride = torch.zeros((), dtype=torch.int64, device=tensor.device), 1
    for size, offset, whole in zip(reversed(sizes), reversed(offsets), reversed(tensor.shape), strict=True):
        along = torch.arange(offset, offset + size, device=tensor.device) * stride
        place = along.view(-1, *[1] * place.dim()) + place
        stride *= whole
    return place


def _random(places: Tensor, *key: object) -> Tensor:
    """32 random bits for each place: a multiplication by an odd number of the key's, then a hash of 32 bits (Wellons
    2018, “Prospecting for Hash Functions”), in int64 so that nothing overflows."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    factor = int.from_bytes(digest[:4], "little") >> 1 | 1
    x = ((places & 0x7FFFFFFF) * factor + int.from_bytes(digest[4:], "little")) & MASK
    for shift, prime in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = ((x ^ (x >> shift)) * prime) & MASK
    return x ^ (x >> 15)

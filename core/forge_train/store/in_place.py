"""Full tensors written to their places in files that are there already, in shares or in shards."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.errors import ForgeError
from . import digest

_PIECE = 256 << 10
"""Bytes that are hashed and written at once: they come from the processor's cache the second time, and their pages are
there when the system copies them."""


@dataclass(frozen=True)
class Place:
    """Location of a tensor."""

    file: str
    start: int
    """Byte of the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return size_of(self.shape, self.dtype)


def as_bytes(tensor: Tensor) -> memoryview:
    """The values of a tensor, in the order of a contiguous one."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def exact_bytes(tensor: Tensor, name: str, shape: Sequence[int], dtype: torch.dtype) -> memoryview:
    """Like `as_bytes`, of a tensor that room was made for.

    Raises:
        ForgeError: if it has another shape or dtype, so that its bytes would be read as other values.
    """
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        found, expected = (f"{[*one]} of {kind}" for one, kind in ((tensor.shape, tensor.dtype), (shape, dtype)))
        raise ForgeError(f"{name!r} can't be written: it is {found}, and {expected} was declared.")
    return as_bytes(tensor)


def pieces(
    place: Place, offsets: Sequence[int], sizes: Sequence[int], data: memoryview
) -> Iterator[tuple[int, memoryview]]:
    """The parts of a shard that lie together in the file, with the byte where each begins.

    Args:
        place: of the full tensor.
        offsets: where in it the shard begins.
        sizes: of the shard.
        data: the bytes of the shard, in the order of a contiguous tensor.
    """
    shape, item = place.shape, place.dtype.itemsize
    strides = [item * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape)  # dimensions from here on are whole
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = range(max(inner - 1, 0))
    first = place.start + sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    length = item * math.prod(sizes[len(outer) :])
    rows = itertools.product(*(range(0, sizes[dim] * strides[dim], strides[dim]) for dim in outer)) if data else ()
    for number, row in enumerate(rows):
        yield first + sum(row), data[number * length : (number + 1) * length]


def write_at(handle: int, data: memoryview, offset: int, hashed: digest.Hasher | None = None) -> None:
    """Write all of it to an open file, and hash it on its way."""
    for start in range(0, len(data), _PIECE):
        piece, at = data[start : start + _PIECE], offset + start
        if hashed is not None:
            hashed.update(piece)
        while piece:
            written = os.pwrite(handle, piece, at)
            piece, at = piece[written:], at + written


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return dtype.itemsize * math.prod(shape)

"""Safetensors files (https://github.com/huggingface/safetensors#format): how tensors are described and written in one,
and what a foreign one is compared with."""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..base.errors import ConfigError, ForgeError
from ..base.strict_json import dumps, parse_json
from .index import Placed, text_of
from .manifest import Hasher, hasher
from .shards import Box, Shard, size_of
from .tree import MODEL

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that readers of safetensors know. Tensors of others are only in files of shards, as bytes."""
PAGE = 4096
"""Alignment of the first value: whole pages are written in half the time, and NFS clients may write whole pages, so the
page with the header must not hold values of another rank."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Described = tuple[str, tuple[int, ...], int]
"""Dtype, shape and first byte of a tensor, as a header has them."""
_PIECE = 256 << 10
"""Bytes that are hashed and written at once: they come from the processor's cache the second time, and their pages are
there when the system copies them."""


def file_of(rank: int, number: int) -> str:
    """The name of a file of shards."""
    return f"rank-{rank:05d}-{number}.safetensors"


def key_in(file: str, name: str, box: Box) -> str:
    """The name of a shard in its file."""
    return name.removeprefix(MODEL) if _FULL.match(file) else f"{name}{text_of(box)}"


_FULL = re.compile(r"model-\d+-of-\d+\.")


def header(tensors: Shapes) -> bytes:
    """The header of a file, filled up to whole pages.

    Args:
        tensors: name → shape and dtype, in the order in which they lie in the file.
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + size_of(shape, dtype)
        kind, stored = stored_as(shape, dtype)
        described[name] = {"dtype": kind, "shape": stored, "data_offsets": [start, end]}
    text = dumps(described).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    return struct.pack("<Q", len(text)) + text


def stored_as(shape: Sequence[int], dtype: torch.dtype) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of a tensor in a header: bytes in a last dimension, where safetensors lacks its dtype."""
    return (DTYPES[dtype], (*shape,)) if dtype in DTYPES else ("U8", (*shape, dtype.itemsize))


def write_shards(file: Path, shards: Sequence[Shard], values: Callable[[Shard], Tensor]) -> tuple[list[Placed], str]:
    """Write shards to a new file, one at a time, and flush it.

    Args:
        file: the file.
        shards: the shards.
        values: gives the tensor of a shard.

    Returns:
        The place of each shard, and the hash of the file.

    Raises:
        ForgeError: if the values of a shard have another shape or dtype.
    """
    ordered = sorted(shards, key=lambda shard: -shard.dtype.itemsize)  # so that each is aligned to its own values
    head = header({f"{one.name}{text_of(one.box)}": (one.sizes, one.dtype) for one in ordered})
    places: dict[Shard, Placed] = {}
    end, hashed = len(head), hasher()
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_at(handle, memoryview(head), 0, hashed)
        for shard in ordered:
            places[shard] = Placed(shard.box, file.name, end)
            write_at(handle, exact_bytes(values(shard), shard.name, shard.sizes, shard.dtype), end, hashed)
            end += shard.bytes
        os.fsync(handle)
    finally:
        os.close(handle)
    return [places[shard] for shard in shards], hashed.hexdigest()


def described(file: Path) -> Mapping[str, Described]:
    """The tensors in a file that may come from anybody. The file is not mapped into memory when values are read, where
    an error of the disk would be a signal that ends the process.

    Raises:
        ConfigError: if its header is damaged, or does not fit the file.
    """
    try:
        with safe_open(file, framework="pt"):
            pass  # the library compares sizes, and refuses gaps and overlaps
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            table = parse_json(data.read(length).decode(), unique=True)
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{file}: not a whole safetensors file: {str(error).rstrip('.')}.") from error
    table.pop("__metadata__", None)
    return {key: (one["dtype"], tuple(one["shape"]), 8 + length + one["data_offsets"][0]) for key, one in table.items()}


# -- bytes in their places --------------------------------------------------------------------------------------------


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


def write_at(handle: int, data: memoryview, offset: int, hashed: Hasher | None = None) -> None:
    """Write all of it to an open file, and hash it on its way."""
    for start in range(0, len(data), _PIECE):
        piece, at = data[start : start + _PIECE], offset + start
        if hashed is not None:
            hashed.update(piece)
        while piece:
            written = os.pwrite(handle, piece, at)
            piece, at = piece[written:], at + written

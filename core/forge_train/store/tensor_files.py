"""Safetensors files (https://github.com/huggingface/safetensors#format): how tensors are described and written in one,
and what a foreign one is compared with."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..base.errors import ConfigError
from ..base.strict_json import dumps
from ..base.untrusted import parse_json
from . import digest
from .in_place import exact_bytes, size_of, write_at
from .index import Placed, text_of
from .shards import Box, Shard
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
    end, hashed = len(head), digest.hasher()
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

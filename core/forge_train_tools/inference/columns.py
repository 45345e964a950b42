"""Records with arrays, appended to a file one by one: a line of JSON each, and the bytes of its arrays after it."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge_train.base.strict_json import dumps, loads

BLOCK = 4 << 20
"""Bytes of memory that what is read at once takes, about."""
_OBJECTS = 2 << 10
"""Of these, bytes that the objects of a record take beside its arrays and texts."""
_SIZE = struct.Struct("<I")
_LINE, _ARRAYS = "line", "arrays"
_DTYPES = {"f": np.dtype("<f4"), "i": np.dtype("<i4")}


def array_value(value: Any) -> Any:
    """A field's value: arrays and numbers of numpy as fp32 or int32, anything else as it is."""
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    return np.asarray(value, _DTYPES["i" if np.issubdtype(value.dtype, np.integer) else "f"])


def packed(line: Mapping[str, Any]) -> bytes:
    """A record as bytes."""
    values = {name: array_value(value) for name, value in line.items()}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    header = {
        _LINE: {name: None if name in arrays else value for name, value in values.items()},
        _ARRAYS: {name: [one.dtype.kind, *one.shape] for name, one in arrays.items()},
    }
    text = dumps(header).encode()
    return b"".join((_SIZE.pack(len(text)), text, *(one.tobytes() for one in arrays.values())))


def blocks(file: Path) -> Iterator[list[dict[str, Any]]]:
    """The records of a file, some at a time: what is in a block depends on the records alone."""
    with file.open("rb") as data:
        block, size = list[dict[str, Any]](), 0
        while head := data.read(_SIZE.size):
            (length,) = _SIZE.unpack(head)
            header = loads(data.read(length).decode())
            line = header[_LINE]
            for name, (kind, *shape) in header[_ARRAYS].items():
                dtype = _DTYPES[kind]
                found = data.read(math.prod(shape) * dtype.itemsize)
                line[name] = np.frombuffer(found, dtype).reshape(shape)
                size += len(found)
            block.append(line)
            size += length + _OBJECTS
            if size >= BLOCK:
                yield block
                block, size = [], 0
        if block:
            yield block


def flushed(file: Path) -> Path:
    """The same file, on disk."""
    with file.open("rb") as data:
        os.fsync(data.fileno())
    return file

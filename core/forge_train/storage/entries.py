"""A tensor in a checkpoint's file: a zip archive as `torch.save` writes it, read without torch's unpickler.

The archive holds the tensor's values as they lie in memory (`data/0`), and a pickle that says how to look at them
(`data.pkl`). Nothing is unpacked: an archive that is compressed is refused, so that what is read is never larger than
the file.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from . import pickles
from .pickles import Call, Mark

_STORAGES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
_REBUILT = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
_FILES, _DIRECTORY, _PICKLE = 64, 1 << 16, 1 << 16
"""Most files of an archive, bytes of its directory, bytes of `data.pkl`; torch (2.13) writes 7, about 600 and 200."""
_ENTRY = "<4s4xHH8xLL3H8xL"
_VIEWS = {"conj": torch.conj, "neg": torch._neg_view}
"""What the values are seen through."""


@dataclass(frozen=True)
class _Look:
    """How the values of a storage are looked at."""

    key: str
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    views: tuple[str, ...]


@dataclass(frozen=True)
class _Stored:
    start: int
    bytes: int


def read_tensor(file: BinaryIO, offset: int, length: int) -> Tensor:
    """A tensor, on the CPU.

    Args:
        file: open for reading.
        offset: where its archive begins.
        length: bytes of its archive.

    Raises:
        ValueError: for an archive that is damaged, or holds anything else than one tensor.
    """
    look, stored = _look(file, offset, length)
    if 0 in look.size:
        return torch.empty(look.size, dtype=look.dtype)
    values = torch.empty(stored.bytes, dtype=torch.uint8)
    file.seek(stored.start)
    if file.readinto(values.numpy()) != stored.bytes:  # type: ignore[attr-defined]
        raise ValueError("it ends too early")
    tensor = values.view(look.dtype).as_strided(look.size, look.stride, look.offset)
    for view in look.views:
        tensor = _VIEWS[view](tensor)
    return tensor


def locate(file: BinaryIO, offset: int, length: int) -> tuple[int, tuple[int, ...], torch.dtype] | None:
    """First byte, shape and dtype of a tensor whose values lie in their order, so that a range of it can be read; None
    if they don't.

    Raises:
        ValueError: as `read_tensor`.
    """
    look, stored = _look(file, offset, length)
    dense = [math.prod(look.size[dim + 1 :]) for dim in range(len(look.size))]
    if (
        look.views
        or 0 in look.size
        or any(n > 1 and a != b for n, a, b in zip(look.size, look.stride, dense, strict=True))
    ):
        return None
    return stored.start + look.offset * look.dtype.itemsize, look.size, look.dtype


def describe(file: BinaryIO, offset: int, length: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor, of which only the description is read.

    Raises:
        ValueError: as `read_tensor`.
    """
    look, _ = _look(file, offset, length)
    return look.size, look.dtype


def _look(file: BinaryIO, offset: int, length: int) -> tuple[_Look, _Stored]:
    try:
        files = _archive(file, offset, length)
        if (order := files.get("byteorder")) and _content(file, order, 16).decode() != sys.byteorder:
            raise ValueError(f"its values are not in the byte order of this machine ({sys.byteorder})")
        look = _understood(pickles.read(_content(file, files["data.pkl"], _PICKLE), _known))
        stored = files[f"data/{look.key}"]
    except (KeyError, IndexError, TypeError, AttributeError, struct.error, UnicodeDecodeError, OSError) as error:
        raise ValueError("it is no tensor as torch saves one") from error
    if math.prod(look.size) == 0:
        return look, stored
    last = look.offset + sum((size - 1) * step for size, step in zip(look.size, look.stride, strict=True))
    item = look.dtype.itemsize
    if max(last + 1, math.prod(look.size)) * item > stored.bytes or stored.bytes % item:
        raise ValueError(f"it declares {math.prod(look.size):,} values in {stored.bytes:,} bytes")
    return look, stored


# -- the pickle -------------------------------------------------------------------------------------------------------


def _known(module: str, name: str) -> object:
    if (module, name) in {*(("torch._utils", name) for name in _REBUILT), ("collections", "OrderedDict")}:
        return Mark(module, name)
    if (module == "torch" and name in _STORAGES) or (module, name) == ("torch.storage", "UntypedStorage"):
        return Mark(module, name)
    if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
        return found
    raise ValueError(f"it names {module}.{name}, which a tensor does not need and which could run code")


def _understood(root: Call) -> _Look:
    storage, offset, size, stride, _grad, _hooks, *rest = root.arguments
    kind, storage_type, key, _device, _numel = storage.arguments
    name = root.function.name  # type: ignore[attr-defined]
    if name not in _REBUILT or storage.function is not pickles.STORAGE or kind != "storage":
        raise TypeError
    dtype = rest.pop(0) if name == "_rebuild_tensor_v3" else _STORAGES[storage_type.name]
    views: Any = rest[0] if rest else {}
    if not isinstance(dtype, torch.dtype) or not isinstance(key, str) or views.keys() - _VIEWS.keys():
        raise TypeError
    if len(size) != len(stride) or any(type(one) is not int or one < 0 for one in (offset, *size, *stride)):
        raise TypeError
    return _Look(key, dtype, offset, size, stride, tuple(name for name, on in views.items() if on is True))


# -- the archive ------------------------------------------------------------------------------------------------------


def _content(file: BinaryIO, stored: _Stored, most: int) -> bytes:
    if stored.bytes > most:
        raise ValueError(f"its description has {stored.bytes:,} bytes, and needs no more than {most:,}")
    file.seek(stored.start)
    return file.read(stored.bytes)


def _archive(file: BinaryIO, offset: int, length: int) -> dict[str, _Stored]:
    """Name → place of the files of an archive, without the folder they are in (APPNOTE.TXT of PKWARE, 4.3)."""
    count, size, start = _directory(file, offset, length)
    if count > _FILES or size > _DIRECTORY or start + size > length:
        raise ValueError("its archive's directory is too large")
    file.seek(offset + start)
    directory, at, found = file.read(size), 0, {}
    for _ in range(count):
        signature, flags, method, packed, unpacked, *lengths, header = struct.unpack_from(_ENTRY, directory, at)
        name_length, extra_length, comment_length = lengths
        name = directory[at + 46 : at + 46 + name_length].decode()
        extra = directory[at + 46 + name_length : at + 46 + name_length + extra_length]
        unpacked, packed, header = _wide(extra, unpacked, packed, header)
        if signature != b"PK\1\2" or flags & 1 or method or packed != unpacked:
            raise ValueError(f"its archive holds {name[:100]!r} compressed or encrypted, as torch does not write it")
        file.seek(offset + header)
        local, *skipped = struct.unpack("<4s22x2H", file.read(30))
        begins = header + 30 + sum(skipped)
        inner = name.partition("/")[2]
        if local != b"PK\3\4" or begins + unpacked > length or inner in found:
            raise ValueError(f"its archive's directory is damaged at {name[:100]!r}")
        found[inner] = _Stored(offset + begins, unpacked)
        at += 46 + name_length + extra_length + comment_length
    return found


def _directory(file: BinaryIO, offset: int, length: int) -> tuple[int, int, int]:
    """Number of files, bytes of the directory, where it begins."""
    if length < 22:
        raise ValueError("its archive is too short")
    file.seek(offset + length - 22)
    signature, count, size, start, comment = struct.unpack("<4s6xHLLH", file.read(22))
    if signature != b"PK\5\6" or comment:
        raise ValueError("it is no archive as torch writes it")
    if count != 0xFFFF and 0xFFFFFFFF not in (size, start):
        return count, size, start
    file.seek(offset + length - 42)
    locator, end = struct.unpack("<4s4xQ4x", file.read(20))
    file.seek(offset + min(end, length))
    wide, count, size, start = struct.unpack("<4s28xQQQ", file.read(56))
    if (locator, wide) != (b"PK\6\7", b"PK\6\6"):
        raise ValueError("it is no archive as torch writes it")
    return count, size, start


def _wide(extra: bytes, *values: int) -> list[int]:
    """Sizes and places, the large ones of which stand in the field for zip64."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            large = iter(struct.unpack(f"<{size // 8}Q", extra[at + 4 : at + 4 + size // 8 * 8]))
            return [next(large, value) if value == 0xFFFFFFFF else value for value in values]
        at += 4 + size
    return list(values)

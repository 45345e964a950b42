"""A folder of torch.distributed.checkpoint (DCP), read chunk by chunk; torch reads each with `weights_only`."""

from __future__ import annotations

import io
import os
import zipfile
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError, describe
from forge_train.store.manifest import SHARDS
from forge_train.store.shards import sizes, whole
from forge_train.store.tensor_files import described, stored_as
from forge_train.store.tree import MODEL

from .dcp_index import Chunk, Index, Stored, read_index

_OPTIMIZER = "optimizer."


class Folder:
    """A DCP folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._weights: dict[str, str] | None = None

    def choose_weights(self) -> dict[str, str]:
        """The tensors outside an optimizer: name in the model → name in the folder.

        Raises:
            ConfigError: if there are none.
        """
        names = [name for name in self.index.tensors if not name.startswith(_OPTIMIZER)]
        if not names:
            raise ConfigError(f"{self.path}: holds no tensors outside an optimizer.")
        start = MODEL if all(name.startswith(MODEL) for name in names) else ""
        self._weights = {name.removeprefix(start): name for name in names}
        return self._weights

    @cached_property
    def index(self) -> Index:
        """Raises ConfigError; see `read_index`."""
        return read_index(self.path)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Name → tensor, on the meta device."""
        return {
            name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in self.index.tensors.items()
        }

    @property
    def files(self) -> set[str]:
        return {chunk.file for stored in self.index.tensors.values() for chunk in stored.chunks}

    def read(self, name: str) -> Tensor:
        """A tensor by its name in the checkpoint.

        Raises:
            ConfigError: if a file holds anything but what the index says.
            OSError: if a file can't be read.
        """
        if self._weights is not None:
            name = self._weights[name.removeprefix(MODEL)]
        stored = self.index.tensors[name]
        if [chunk.box for chunk in stored.chunks] == [whole(stored.shape)]:
            return self._chunk(name, stored, stored.chunks[0])
        full = torch.empty(stored.shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            full[tuple(slice(low, high) for low, high in chunk.box)] = self._chunk(name, stored, chunk)
        return full

    def _chunk(self, name: str, stored: Stored, chunk: Chunk) -> Tensor:
        file = self.path / chunk.file
        try:
            if chunk.file.endswith(SHARDS):
                values = _full_tensor(file, name, stored, chunk)
            else:
                with file.open("rb", buffering=0) as data, io.BufferedReader(_Part(data, chunk)) as part:
                    values = _saved(part, chunk.length)
        except (OSError, ConfigError):
            raise
        except Exception as error:
            text = (str(error) if type(error) is ValueError else describe(error)).partition("\n")[0][:200].rstrip(".")
            raise ConfigError(f"{file}: {name!r} can't be read by torch with weights_only: {text}.") from error
        expected = (sizes(chunk.box), stored.dtype)
        if (found := (tuple(values.shape), values.dtype)) != expected:
            words = " and ".join(
                f"{[*shape]} of {dtype}{by}" for (shape, dtype), by in ((found, ""), (expected, " by"))
            )
            raise ConfigError(f"{file}: {name!r} can't be read: it is {words} the index.")
        return values


class _Part(io.RawIOBase):
    """The bytes of a chunk, as a file."""

    def __init__(self, data: io.FileIO, chunk: Chunk) -> None:
        self._data, self._start, self._length, self._at = data, chunk.start, chunk.length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")[: max(self._length - self._at, 0)]
        self._data.seek(self._start + self._at)
        got = self._data.readinto(view) or 0
        self._at += got
        return got


def _saved(data: IO[bytes], length: int) -> Tensor:
    """A tensor that torch saved."""
    with zipfile.ZipFile(data) as archive:  # of compressed values, a few bytes may fill the memory
        held = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in held) or sum(one.file_size for one in held) > length:
        raise ValueError("its values are compressed, as torch never writes them")
    data.seek(0)
    found = torch.load(data, map_location="cpu", weights_only=True)
    if type(found) is not Tensor or found.layout != torch.strided or found.is_quantized or found.device.type != "cpu":
        raise ValueError("it is no plain tensor")
    return found


def _full_tensor(file: Path, name: str, stored: Stored, chunk: Chunk) -> Tensor:
    """A full tensor in an older checkpoint of Forge."""
    key = name.removeprefix(MODEL)
    expected = (*stored_as(stored.shape, stored.dtype), chunk.start)
    if chunk.box != whole(stored.shape) or described(file).get(key) != expected:
        raise ConfigError(f"{file}: {key[:100]!r} can't be read: its shape, dtype or place is not that of the index.")
    with file.open("rb") as data:
        data.seek(chunk.start)
        values = torch.frombuffer(bytearray(data.read(chunk.length)), dtype=torch.uint8)
    return values.view(stored.dtype).reshape(stored.shape)

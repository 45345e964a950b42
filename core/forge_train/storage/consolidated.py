"""A model's weights as full tensors in safetensors files, for programs that do not know Forge (`checkpoint.format`).

Each rank writes its shards to their places in the full tensors, so no rank holds more than its own share.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..ground.files import write_json
from ..ground.strict_json import dumps
from .in_place import Place, as_bytes, fill, pieces, size_of, write_at
from .tree import MODEL

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

Format = Literal["sharded", "safetensors", "both"]
INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, as transformers has it."""
ENDING = ".safetensors"
SHARD_BYTES = 5_000_000_000
"""Largest file that is written, if its tensors are not larger."""
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
"""What a safetensors file can hold. Tensors of other dtypes stay in shards."""
_PAGE = 4096
"""Where values begin: whole pages are written in half the time, and NFS clients may write whole pages, so the one with
the header must not hold values of another rank."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Files:
    """The files of a checkpoint's model, as they are going to be."""

    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]
    """File → bytes."""
    places: Mapping[str, Place]
    """Tensor, by its name in the checkpoint → place."""
    alone: bool
    """Whether these tensors are in no shards."""

    @classmethod
    def of(cls, tensors: Shapes, *, alone: bool) -> Files:
        """The files for those tensors of a checkpoint that belong to the model.

        Args:
            tensors: name → shape and dtype.
            alone: see `Files`.
        """
        held = {name: one for name, one in tensors.items() if name.startswith(MODEL) and one[1] in DTYPES}
        ordered = sorted(held, key=lambda name: (-held[name][1].itemsize, name))  # each aligned to its own values
        groups = cut({name: size_of(*held[name]) for name in ordered}, SHARD_BYTES) if ordered else []
        headers: dict[str, bytes] = {}
        sizes: dict[str, int] = {}
        places: dict[str, Place] = {}
        for number, names in enumerate(groups, 1):
            file = f"model-{number:05d}-of-{len(groups):05d}{ENDING}"
            headers[file] = header({name.removeprefix(MODEL): held[name] for name in names})
            sizes[file] = len(headers[file])
            for name in names:
                places[name] = Place(file, sizes[file], *held[name])
                sizes[file] += places[name].bytes
        return cls(headers, sizes, places, alone)

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    # -- which shards ---------------------------------------------------------------------------------------------

    def full(self, items: Sequence[WriteItem]) -> list[WriteItem]:
        """The shards that are parts of these tensors."""
        return [item for item in items if item.index.fqn in self.places]

    def shards(self, items: Sequence[WriteItem]) -> list[WriteItem]:
        """The shards that are written as shards."""
        return [item for item in items if not (self.alone and item.index.fqn in self.places)]

    def results(self) -> list[WriteResult]:
        """Where the index is to find the tensors."""
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.storage import WriteResult

        return [
            WriteResult(
                MetadataIndex(name, torch.Size([0] * len(place.shape))),
                place.bytes,
                _StorageInfo(place.file, place.start, place.bytes),
            )
            for name, place in self.places.items()
        ]

    def pointed_to(self, index: Metadata) -> Metadata:
        """An index in which each of the tensors is a single shard."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

        entries = dict(index.state_dict_metadata)
        for name in self.places:
            entry = entries[name]
            assert isinstance(entry, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(entry.size)), entry.size)
            entries[name] = replace(entry, chunks=[chunk])
        return replace(index, state_dict_metadata=entries)

    # -- writing --------------------------------------------------------------------------------------------------

    def create(self, folder: Path) -> None:
        """Write the index, and the files with room for the tensors. One process does this before any other writes."""
        for name, text in self.headers.items():
            with (folder / name).open("wb") as out:
                out.write(text)
                out.truncate(self.sizes[name])
        values = sum(place.bytes for place in self.places.values())
        write_index(folder, {name.removeprefix(MODEL): place.file for name, place in self.places.items()}, values)

    def fill(self, folder: Path, values: Callable[[str], Tensor], *, rank: int = 0, world: int = 1) -> dict[str, str]:
        """Write full tensors to their places, one at a time, and flush them; the hashes of files that are whole then.

        Args:
            folder: holds the files that `create` made.
            values: gives a tensor by its name in the checkpoint.
            rank: number of the share; see `fill`.
            world: number of shares.
        """
        return fill(
            folder, self.headers, self.places, lambda name: as_bytes(values(name)), rank=rank, world=world, hashed=True
        )

    def write(self, folder: Path, items: Sequence[WriteItem], values: Callable[[WriteItem], Any]) -> None:
        """Write shards to their places, and flush them.

        Args:
            folder: holds the files that `create` made.
            items: the shards.
            values: gives the tensor of a shard.
        """
        by_file: dict[str, list[WriteItem]] = {}
        for item in sorted(items, key=lambda item: self.places[item.index.fqn].start):
            by_file.setdefault(self.places[item.index.fqn].file, []).append(item)
        for name, mine in by_file.items():
            # Not for reading too: an NFS client would then write back the rest of a page, which may be another rank's.
            handle = os.open(folder / name, os.O_WRONLY)
            try:
                for item in mine:
                    assert item.tensor_data is not None
                    place, chunk = self.places[item.index.fqn], item.tensor_data.chunk
                    for offset, piece in pieces(place, chunk.offsets, chunk.sizes, as_bytes(values(item))):
                        write_at(handle, piece, offset)
                os.fsync(handle)
            finally:
                os.close(handle)


# -- the format ---------------------------------------------------------------------------------------------------


def cut(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Tensors in as few files as their sizes allow, in their order.

    Args:
        sizes: name → bytes.
        limit: bytes of a file, which only a single tensor may exceed.
    """
    files: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files


def header(tensors: Shapes) -> bytes:
    """What a file begins with (https://github.com/huggingface/safetensors#format), filled up to whole pages.

    Args:
        tensors: name → shape and dtype, in the order in which they lie in the file.
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + size_of(shape, dtype)
        described[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = dumps(described).encode()
    text += b" " * (-(len(text) + 8) % _PAGE)
    return struct.pack("<Q", len(text)) + text


def write_index(folder: Path, files: Mapping[str, str], total: int) -> None:
    """Write which file holds each tensor.

    Args:
        folder: of the files.
        files: tensor → file.
        total: bytes of all tensors.
    """
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(files)})

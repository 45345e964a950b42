"""A model's weights as full tensors in safetensors files, for programs that do not know Forge (`checkpoint.format`).

Each rank writes its shards to their places in the full tensors, so no rank holds more than its own share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forge_train.base.files import write_json
from forge_train.store.index import Placed
from forge_train.store.save_plan import MakeFiles
from forge_train.store.shards import Shard, size_of, whole
from forge_train.store.tensor_files import DTYPES, Place, Shapes, exact_bytes, header, pieces, write_at
from forge_train.store.tree import MODEL

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, as transformers has it."""
ENDING = ".safetensors"
SHARD_BYTES = 5_000_000_000
"""Largest file that is written, if its tensors are not larger."""


@dataclass(frozen=True)
class Files:
    """The files of a checkpoint's model, as they are going to be."""

    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]
    """File → bytes."""
    places: Mapping[str, Place]
    """Tensor, by its name in the checkpoint → place."""
    alone: bool
    """True if these tensors are not also in shards."""
    fill: Callable[[Path, Files], Mapping[str, str]] | None = None
    """Writes all of them at once into files that have room for them, where this is the only process; gives the hashes
    that it knows."""

    @classmethod
    def of(
        cls, tensors: Shapes, *, alone: bool, fill: Callable[[Path, Files], Mapping[str, str]] | None = None
    ) -> Files:
        """The files for those tensors of a checkpoint that belong to the model.

        Args:
            tensors: name → shape and dtype.
            alone: see `Files`, as for `fill`.
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
        return cls(headers, sizes, places, alone, fill)

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    # -- which shards ---------------------------------------------------------------------------------------------

    def others(self, shards: Sequence[Shard]) -> list[Shard]:
        """The shards that are written to the files of shards."""
        return [shard for shard in shards if not (self.alone and shard.name in self.places)]

    def placed(self) -> list[tuple[str, Placed]]:
        """Return the places, for the index, of tensors that are not in shards."""
        if not self.alone:
            return []
        full = ((name, place) for name, place in self.places.items() if place.bytes)
        return [(name, Placed(whole(place.shape), place.file, place.start)) for name, place in full]

    # -- writing --------------------------------------------------------------------------------------------------

    def create(self, folder: Path) -> Mapping[str, str]:
        """Write the index, and the files with room for the tensors; gives the hashes of files that are complete. One
        process does this before any other writes."""
        for name, text in self.headers.items():
            with (folder / name).open("wb") as out:
                out.write(text)
                out.truncate(self.sizes[name])
        values = sum(place.bytes for place in self.places.values())
        write_index(folder, {name.removeprefix(MODEL): place.file for name, place in self.places.items()}, values)
        return self.fill(folder, self) if self.fill else {}

    def write(self, folder: Path, shards: Sequence[Shard], values: Callable[[Shard], Tensor]) -> None:
        """Write those of some shards that are parts of these tensors to their places, and flush them.

        Args:
            folder: holds the files that `create` made.
            shards: the shards.
            values: gives the tensor of a shard.
        """
        by_file: dict[str, list[Shard]] = {}
        own = [] if self.fill else [shard for shard in shards if shard.name in self.places]
        for shard in sorted(own, key=lambda shard: self.places[shard.name].start):
            by_file.setdefault(self.places[shard.name].file, []).append(shard)
        for name, mine in by_file.items():
            # Not for reading too: an NFS client would then write back the rest of a page, which may be another rank's.
            handle = os.open(folder / name, os.O_WRONLY)
            try:
                for shard in mine:
                    place, begin = self.places[shard.name], [low for low, _ in shard.box]
                    data = exact_bytes(values(shard), shard.name, shard.sizes, shard.dtype)
                    for offset, piece in pieces(place, begin, shard.sizes, data):
                        write_at(handle, piece, offset)
                os.fsync(handle)
            finally:
                os.close(handle)


def files_of(form: str) -> MakeFiles | None:
    """Return what makes the files of a `checkpoint.format`; None for shards alone."""
    return None if form == "sharded" else partial(Files.of, alone=form == "safetensors")


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


def write_index(folder: Path, files: Mapping[str, str], total: int) -> None:
    """Write which file holds each tensor.

    Args:
        folder: of the files.
        files: tensor → file.
        total: bytes of all tensors.
    """
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(files)})

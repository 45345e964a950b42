"""Ranges of a checkpoint's weights, as evaluation uses them. Only the requested bytes are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..state_map import Box
from ..state_map.views import Stored, View, sizes
from . import checkpoint, evaluated
from .metadata import read_index
from .shards import reader
from .tree import MODEL

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


class Weights:
    """The weights of checkpoints that are known to be whole.

    Args:
        where: name of a parameter or buffer → the checkpoint that holds it.
    """

    def __init__(self, where: Mapping[str, Path]) -> None:
        self._where = dict(where)

    @cached_property
    def views(self) -> dict[str, View]:
        """Each weight, as a state map takes it."""
        shapes = {path: checkpoint.shapes(path) for path in set(self._where.values())}
        return {name: Stored(*shapes[path][f"{MODEL}{name}"], name) for name, path in self._where.items()}

    @cached_property
    def _sums(self) -> dict[Path, dict[str, dict[str, float]]]:
        return {path: evaluated.sums(path) for path in set(self._where.values())}

    def read(self, name: str, box: Box) -> Tensor:
        """A range of one weight, on the CPU."""
        path, own = self._where[name], f"{MODEL}{name}"
        weight = _read(path, own, box)
        if terms := self._sums[path].get(name):
            weight.mul_(terms.get(own, 0.0))
            for key, factor in terms.items():
                if key != own:
                    weight.add_(_read(path, key, box), alpha=factor)
        return weight


def _read(path: Path, key: str, box: Box) -> Tensor:
    """A range of a tensor, from the shards that it lies in."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    index = read_index(path)
    tensor: TensorStorageMetadata = index.state_dict_metadata[key]  # type: ignore[assignment]
    places: Mapping[MetadataIndex, Any] = index.storage_data or {}
    whole: Tensor | None = None
    for chunk in tensor.chunks:
        common = [
            (max(low, begin), min(high, begin + length))
            for (low, high), begin, length in zip(box, chunk.offsets, chunk.sizes, strict=True)
        ]
        if any(low >= high for low, high in common):
            continue
        part = tuple(slice(low - begin, high - begin) for (low, high), begin in zip(common, chunk.offsets, strict=True))
        shard = MetadataIndex(key, chunk.offsets)
        with reader(path, places[shard].relative_path) as read_part:
            found = read_part(shard, places[shard], part)
        if tuple(common) == box:
            return found
        if whole is None:
            whole = torch.empty(sizes(box), dtype=tensor.properties.dtype)
        whole[tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(common, box, strict=True))] = found
    return torch.empty(sizes(box), dtype=tensor.properties.dtype) if whole is None else whole

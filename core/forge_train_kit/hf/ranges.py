"""Ranges of a checkpoint's weights, as evaluation uses them. Only the requested bytes are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from torch import Tensor

from forge_train.checkpoint import checkpoint
from forge_train.store.tensors import read_range
from forge_train.store.tree import MODEL

from ..state_map import Box
from ..state_map.views import Stored, View
from ..stored import evaluation_sums


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
        return {path: evaluation_sums(path) for path in set(self._where.values())}

    def read(self, name: str, box: Box) -> Tensor:
        """A range of one weight, on the CPU."""
        path, own = self._where[name], f"{MODEL}{name}"
        weight = read_range(path, own, box)
        if terms := self._sums[path].get(name):
            weight.mul_(terms.get(own, 0.0))
            for key, factor in terms.items():
                if key != own:
                    weight.add_(read_range(path, key, box), alpha=factor)
        return weight

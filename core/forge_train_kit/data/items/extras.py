"""Items of rows as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_train.contract.batch import TOKENS, Axes

from ...modalities import extras_of, paces_of

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowItems:
    """Items of one modality in one row."""

    values: NDArray[Any]
    """`[patches, features]`, one item after the other."""
    grids: Int64
    """`[items, 3]`."""
    places: Int64
    """`[sequence]`, the feature vector that stands at each position, and −1 at others."""
    paces: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """`[items]`, the positions along time between the vectors of each; empty where all are 1."""
    replaced: tuple[str, ...] = ()
    """Items that could not be read, for which zeros stand in: a sentence for each."""

    @classmethod
    def none(cls, features: int, sequence: int) -> RowItems:
        """A row without items."""
        return cls(np.zeros((0, features), np.uint8), np.zeros((0, 3), np.int64), np.full(sequence, -1, np.int64))


def padded(rows: Sequence[Mapping[str, RowItems]]) -> dict[str, NDArray[Any]]:
    """The extras of a batch, by name.

    A batch without items has one patch of zeros in each row, so that every rank runs the encoder.

    Args:
        rows: each has all modalities.
    """
    found: dict[str, NDArray[Any]] = {}
    for name in rows[0]:
        each = [row[name] for row in rows]
        values, grids = _stacked([one.values for one in each]), _stacked([one.grids for one in each])
        places = np.stack([one.places for one in each])
        found |= dict(zip(extras_of(name), (values, grids, places), strict=True))
        if any((one.paces != 1).any() for one in each):
            found[paces_of(name)] = _stacked([one.paces for one in each])
    return found


def item_axes(rows: Sequence[Mapping[str, RowItems]] | None) -> dict[str, Axes]:
    """The axes of these extras that are cut along the sequence."""
    return {extras_of(name)[2]: TOKENS for name in (rows[0] if rows else ())}


def _stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """`[n, …]` each → `[parts, longest, …]`, with zeros after the shorter ones."""
    dtype = np.result_type(*([one.dtype for one in parts if len(one)] or [parts[0].dtype]))
    made = np.zeros((len(parts), max(1, *map(len, parts)), *parts[0].shape[1:]), dtype)
    for line, part in zip(made, parts, strict=True):
        line[: len(part)] = part
    return made

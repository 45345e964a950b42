"""Differences between two checkpoints: tensors by name and size of difference, and the rest of the state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forge_train.checkpoint import checkpoint
from forge_train.store.shards import whole
from forge_train.store.tensors import read_range
from forge_train.store.tree import TENSOR

PIECE = 1 << 22
"""Number of values compared at once."""
_APART = ("config", "enabled", "progress")


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between the checkpoints."""

    name: str
    kind: Literal["values", "shape", "only in the first", "only in the second"]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[str | None, str | None]
    max_abs: float | None = None
    """The largest difference between two values; infinite if only one of them is finite."""
    relative: float | None = None
    """Norm of the difference, divided by the norm of the first; infinite if that is 0."""
    values: int = 0
    """Number of values that differ."""


@dataclass(frozen=True)
class StateDifference:
    """A value that differs; None if a checkpoint lacks it."""

    key: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Differences:
    """The differences between two checkpoints."""

    equal: int
    """Tensors that are equal to the bit."""
    tensors: tuple[TensorDifference, ...]
    state: tuple[StateDifference, ...]


def compare(first: Path, second: Path, *, prefix: str = "") -> Differences:
    """Compare two whole checkpoints; memory holds one tensor of each at a time.

    Args:
        first: a checkpoint.
        second: another one.
        prefix: compare only tensors whose names begin with it, and not the state.
    """
    shapes = checkpoint.shapes(first), checkpoint.shapes(second)
    names = sorted(name for name in shapes[0].keys() | shapes[1].keys() if name.startswith(prefix))
    found = [_compare(name, (first, second), shapes) for name in names]
    different = tuple(one for one in found if one is not None)
    state = () if prefix else tuple(_state(checkpoint.read_state(first), checkpoint.read_state(second)))
    return Differences(len(names) - len(different), different, state)


def _compare(name: str, paths: tuple[Path, Path], shapes: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    (shape_a, dtype_a), (shape_b, dtype_b) = (one.get(name, (None, None)) for one in shapes)
    dtypes = tuple(None if dtype is None else str(dtype).removeprefix("torch.") for dtype in (dtype_a, dtype_b))
    about: Any = {"name": name, "shapes": (shape_a, shape_b), "dtypes": dtypes}
    if shape_b is None:
        return TensorDifference(kind="only in the first", **about)
    if shape_a is None:
        return TensorDifference(kind="only in the second", **about)
    if shape_a != shape_b:
        return TensorDifference(kind="shape", **about)
    a = read_range(paths[0], name, whole(shape_a)).reshape(-1)
    b = read_range(paths[1], name, whole(shape_b)).reshape(-1)
    if dtype_a == dtype_b and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    max_abs, relative, values = _distance(a, b)
    return TensorDifference(kind="values", max_abs=max_abs, relative=relative, values=values, **about)


def _distance(a: Tensor, b: Tensor) -> tuple[float, float, int]:
    """The largest difference, the relative one, and how many values differ. Two NaNs are equal."""
    largest, squares, norm, values = 0.0, 0.0, 0.0, 0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    for start in range(0, a.numel(), PIECE):
        x, y = a[start : start + PIECE].to(wide), b[start : start + PIECE].to(wide)
        same = (x == y) | (x.isnan() & y.isnan())
        apart = (x - y).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = max(largest, float(apart.max()))
        squares += float(apart.square().sum())
        norm += float(x.abs().square().nan_to_num(nan=0.0, posinf=0.0).sum())
        values += int((~same).sum())
    relative = math.sqrt(squares / norm) if norm else math.inf if squares else 0.0
    return largest, relative, values


# -- the rest of the state --------------------------------------------------------------------------------------------


def _state(first: dict[str, Any], second: dict[str, Any]) -> Iterator[StateDifference]:
    sides = [
        {
            **dict(_leaves({key: value for key, value in state.items() if key not in _APART}, "")),
            **state.get("progress", {}),
            **state.get("config", {}),
            **{f"plugin {entry['name']}": entry["version"] for entry in state.get("enabled", ())},
        }
        for state in (first, second)
    ]
    for key in sorted(sides[0].keys() | sides[1].keys()):
        values = sides[0].get(key), sides[1].get(key)
        if repr(values[0]) != repr(values[1]):  # repr makes NaN equal to NaN
            yield StateDifference(key, *values)


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Dotted key → value, without the names of tensors."""
    if isinstance(tree, dict) and tree.keys() == {TENSOR}:
        return
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    else:
        yield name, tree

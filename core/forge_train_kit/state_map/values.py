"""Operations on values: tensors keep their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge_train.base.errors import ConfigError

from .growth import MeanRow
from .maps import StateMap, Step
from .names import template
from .rules import has_dims
from .views import Converted, Filled, Joined, Reordered, Transposed, View

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Transpose(StateMap):
    """Swaps two dimensions; by default those of a matrix."""

    names: tuple[str, ...]
    dims: tuple[int, int] = (0, 1)

    def apply(self, step: Step) -> None:
        for name, view in _each(step, self.names, *self.dims):
            step.give(name, Transposed.of(view, self.dims))

    def inverse(self) -> StateMap:
        return self


@dataclass(frozen=True)
class Rotary(StateMap):
    """Changes the order of rotary features.

    The two features of a pair are neighbours (`interleaved`, arXiv:2104.09864), or half a head apart (`half`, as in
    transformers' Llama).

    Args:
        names: of the projections of queries and keys, `[heads · head_dim, …]`.
        head_dim: features of a head.
        to: the new order; the tensors have the other order.
        turned: number of rotated features of a head; 0 means all.
    """

    names: tuple[str, ...]
    head_dim: int
    to: Literal["half", "interleaved"] = "half"
    turned: int = 0

    def __post_init__(self) -> None:
        if self.to not in ("half", "interleaved"):
            raise ConfigError(f"Rotary: unknown order {self.to!r}; expected 'half' or 'interleaved'.")
        if self.turned % 2 or (self.turned or self.head_dim) % 2 or not 0 <= self.turned <= self.head_dim:
            raise ConfigError(f"Rotary: {self.turned or self.head_dim} of {self.head_dim} features can't be paired.")

    def apply(self, step: Step) -> None:
        turned, order = self.turned or self.head_dim, [*range(self.head_dim)]
        half = [*range(0, turned, 2), *range(1, turned, 2)]
        order[:turned] = half if self.to == "half" else [half.index(feature) for feature in range(turned)]
        for name, view in _each(step, self.names, 0):
            if view.shape[0] % self.head_dim:
                step.wrong.append(f"{name}: {view.shape[0]} features are not a multiple of head_dim = {self.head_dim}")
            step.give(name, Reordered(view.shape, view.dtype, view, 0, tuple(order)))

    def inverse(self) -> StateMap:
        return Rotary(self.names, self.head_dim, "interleaved" if self.to == "half" else "half", self.turned)


@dataclass(frozen=True)
class Resize(StateMap):
    """Changes the size of a vocabulary: adds rows at the end, or drops the last ones.

    Args:
        names: of the embedding and the head.
        before: number of rows before the change.
        after: number of rows after the change.
        fill: value of added rows, or `mean` for the mean of the old rows.
    """

    names: tuple[str, ...]
    before: int
    after: int
    fill: float | Literal["mean"] = 0.0

    def apply(self, step: Step) -> None:
        for name, view in _each(step, self.names, 0):
            if view.shape[0] != self.before:
                step.wrong.append(f"{name}: expected {self.before} rows, found {view.shape[0]}")
            added = self.after - self.before
            shape = (max(added, 0), *view.shape[1:])
            more = MeanRow(shape, view.dtype, view) if self.fill == "mean" else Filled(shape, view.dtype, self.fill)
            pieces = [(view, 0, min(self.before, self.after)), (more, 0, more.shape[0])]
            step.give(name, Joined.of(pieces, 0))

    def inverse(self) -> StateMap:
        return Resize(self.names, self.after, self.before, self.fill)


@dataclass(frozen=True)
class Cast(StateMap):
    """Changes the dtype. The inverse restores the values exactly only if `after` can hold every value of `before`."""

    names: tuple[str, ...]
    before: torch.dtype
    after: torch.dtype

    def apply(self, step: Step) -> None:
        for name, view in _each(step, self.names):
            if view.dtype != self.before:
                step.wrong.append(f"{name}: expected {self.before}, found {view.dtype}")
            step.give(name, Converted(view.shape, self.after, view))

    def inverse(self) -> StateMap:
        return Cast(self.names, self.after, self.before)


@dataclass(frozen=True)
class Unread(StateMap):
    """Drops tensors that the model does not read; they need not exist. Its inverse gives them, each with one value.

    Args:
        values: name → value.
        like: the model's tensor whose shape and dtype they have.
    """

    values: Mapping[str, float]
    like: str

    def apply(self, step: Step) -> None:
        for name in self.values:
            if name in step.tensors:
                step.take(name)

    def inverse(self) -> StateMap:
        return _Given(self)


@dataclass(frozen=True)
class _Given(StateMap):
    unread: Unread

    def apply(self, step: Step) -> None:
        if (like := step.tensors.get(self.unread.like)) is None:
            step.wrong.append(f"{self.unread.like}: missing")
            return
        for name, value in self.unread.values.items():
            step.give(name, Filled(like.shape, like.dtype, value))

    def inverse(self) -> StateMap:
        return self.unread


def _each(step: Step, names: tuple[str, ...], *dims: int) -> list[tuple[str, View]]:
    """The tensors of these names, which are taken and will be given again under the same names."""
    found = [name for text in names for name in template(text).find(step.tensors)]
    taken = [(name, view) for name in found for view in step.take(name)]
    return [(name, view) for name, view in taken if has_dims(step, name, view, *dims)]

"""Operations that merge a tensor's last dimensions into one: a convolution's weight becomes a matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_train.base.errors import ConfigError
from forge_train.store.shards import Box, whole

from .maps import StateMap, Step
from .names import template
from .views import Shape, View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Flatten(StateMap):
    """Merges the last dimensions into one, in row-major order.

    Args:
        names: of the tensors.
        sizes: of these dimensions, such as (14, 14, 3).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError(f"Flatten: expected sizes of at least 1, found {self.sizes}.")

    def apply(self, step: Step) -> None:
        kept = len(self.sizes)
        for name in (name for text in self.names for name in template(text).find(step.tensors)):
            for view in step.take(name):
                if view.shape[-kept:] != self.sizes:
                    step.wrong.append(f"{name}: {list(view.shape)} does not end with {list(self.sizes)}")
                    continue
                step.give(name, Flat((*view.shape[:-kept], math.prod(self.sizes)), view.dtype, view, kept))

    def inverse(self) -> StateMap:
        return Unflatten(self.names, self.sizes)


@dataclass(frozen=True)
class Unflatten(Flatten):
    """Takes the last dimension apart; the inverse of `Flatten`."""

    def apply(self, step: Step) -> None:
        for name in (name for text in self.names for name in template(text).find(step.tensors)):
            for view in step.take(name):
                if view.shape[-1:] != (math.prod(self.sizes),):
                    step.wrong.append(f"{name}: {list(view.shape)} does not end with {math.prod(self.sizes)}")
                    continue
                step.give(name, Unflat((*view.shape[:-1], *self.sizes), view.dtype, view, len(self.sizes)))

    def inverse(self) -> StateMap:
        return Flatten(self.names, self.sizes)


@dataclass(frozen=True, eq=False)
class Flat(View):
    """The last dimensions as one."""

    inner: View
    merged: int

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        sizes: Shape = self.inner.shape[-self.merged :]
        rest = math.prod(sizes[1:])
        low, high = box[-1]
        return [(self.inner, (*box[:-1], (low // rest, -(-high // rest)), *whole(sizes[1:])))]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        low, high = box[-1]
        start = low % math.prod(self.inner.shape[-self.merged :][1:])
        return parts[0].flatten(-self.merged)[..., start : start + high - low]


@dataclass(frozen=True, eq=False)
class Unflat(View):
    """The last dimension as several."""

    inner: View
    parted: int

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        rest = math.prod(self.shape[-self.parted :][1:])
        low, high = box[-self.parted]
        return [(self.inner, (*box[: -self.parted], (low * rest, high * rest)))]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        low, high = box[-self.parted]
        inner = parts[0].reshape(*parts[0].shape[:-1], high - low, *self.shape[-self.parted :][1:])
        for dim, (start, stop) in enumerate(box[len(box) - self.parted + 1 :], inner.ndim - self.parted + 1):
            inner = inner.narrow(dim, start, stop - start)
        return inner

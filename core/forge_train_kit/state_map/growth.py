"""Operations that make a larger or a smaller model: they copy tensors and renumber layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from forge_train.base.errors import ConfigError
from forge_train.store.shards import Box, sizes

from .maps import StateMap, Step
from .names import same_placeholders, template
from .views import View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Repeat(StateMap):
    """Stacks copies of each tensor along a new first dimension: experts that all start as one dense block
    (arXiv:2212.05055). It has no inverse, because the copies may differ once they are trained.

    Args:
        name: the tensor to copy, such as `layers.{i}.up.weight`.
        whole: the stack, such as `layers.{i}.experts.up`, with the same placeholders.
        count: number of copies.
    """

    name: str
    whole: str
    count: int

    def __post_init__(self) -> None:
        same_placeholders("Repeat", (self.name, self.whole))
        if self.count < 1:
            raise ConfigError(f"Repeat: expected a count of at least 1, found {self.count}.")

    def apply(self, step: Step) -> None:
        for name, bindings in template(self.name).find(step.tensors).items():
            for view in step.take(name):
                step.give(template(self.whole).fill(bindings), Repeated.of(view, self.count))

    def inverse(self) -> NoReturn:
        raise ConfigError("Repeat has no inverse: the copies may differ once they are trained.")


@dataclass(frozen=True)
class Renumber(StateMap):
    """Renumbers tensors, such as the layers of a deeper or a shallower model.

    Args:
        names: such as `layers.{i}.{rest*}`; `{i}` is the number, from 0.
        order: for each new number, the old one. Repeating a number copies its tensors; leaving one out drops
            them.
    """

    names: str
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if "i" not in template(self.names).placeholders:
            raise ConfigError(f"Renumber: {self.names!r} has no placeholder {{i}} for the number.")
        if not self.order or min(self.order) < 0:
            raise ConfigError(f"Renumber: expected old numbers, from 0, found {self.order}.")

    def apply(self, step: Step) -> None:
        found = template(self.names).find(step.tensors)
        there = {bindings["i"] for bindings in found.values()}
        gone = sorted({old for old in self.order if str(old) not in there})
        step.wrong += [f"{template(self.names).text}: no number {old} among {len(there)}, from 0" for old in gone]
        for name, bindings in found.items():
            for view in step.take(name):
                for new, old in enumerate(self.order):
                    if str(old) == bindings["i"]:
                        step.give(template(self.names).fill({**bindings, "i": str(new)}), view)

    def inverse(self) -> StateMap:
        if sorted(self.order) != [*range(len(self.order))]:
            raise ConfigError("Renumber has no inverse if it copies or drops tensors.")
        return Renumber(self.names, tuple(self.order.index(old) for old in range(len(self.order))))


@dataclass(frozen=True, eq=False)
class MeanRow(View):
    """Every row is the mean of all rows."""

    inner: View

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.inner, ((0, self.inner.shape[0]), *box[1:]))]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        import torch

        return parts[0].mean(0, keepdim=True, dtype=torch.float32).to(self.dtype).expand(sizes(box))


@dataclass(frozen=True, eq=False)
class Repeated(View):
    """Copies of a tensor along a new first dimension; the tensor is read once."""

    inner: View

    @classmethod
    def of(cls, inner: View, count: int) -> Repeated:
        return cls((count, *inner.shape), inner.dtype, inner)

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.inner, box[1:])]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        return parts[0].unsqueeze(0).expand(sizes(box))

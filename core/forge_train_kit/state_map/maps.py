"""State maps, their composition, and the plan that a map makes for given tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_list
from forge_train.store.shards import Box, whole

from .views import Fetch, Shape, Stored, View, read, reads, write

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class Step:
    """One application of a map: the tensors that it finds, takes and gives, and what does not fit."""

    tensors: Mapping[str, View]
    taken: set[str] = field(default_factory=set)
    given: dict[str, View] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def take(self, *names: str) -> list[View]:
        """The tensors of these names, which nothing else may take afterwards; empty if one of them is missing."""
        for name in names:
            if name not in self.tensors:
                beside = next((f", although {other} exists" for other in names if other in self.tensors), "")
                self.wrong.append(f"{name}: missing{beside}")
            elif name in self.taken:
                self.wrong.append(f"{name}: taken twice")
        self.taken.update(name for name in names if name in self.tensors)
        return [self.tensors[name] for name in names] if all(name in self.tensors for name in names) else []

    def give(self, name: str, view: View) -> None:
        if name in self.given:
            self.wrong.append(f"{name}: given twice")
        self.given[name] = view

    @property
    def left(self) -> list[str]:
        """Names of the tensors that nothing takes."""
        return [name for name in self.tensors if name not in self.taken]


class StateMap(ABC):
    """A map from tensors by name to other tensors by name.

    `one >> other` applies two maps in order, `one | other` side by side.
    """

    @abstractmethod
    def apply(self, step: Step) -> None:
        """Take tensors from a step and give it others. Anything that does not fit is added to `step.wrong`."""

    @abstractmethod
    def inverse(self) -> StateMap:
        """The inverse map.

        Raises:
            ConfigError: if there is none, because the map loses values.
        """

    def trace(self, tensors: Mapping[str, tuple[Shape, torch.dtype]]) -> Step:
        """Apply the map to tensors of these shapes and dtypes, without reading any of them.

        Args:
            tensors: name → shape and dtype.
        """
        stored = {name: Stored(shape, dtype, name) for name, (shape, dtype) in tensors.items()}
        step = Step(stored)
        self.apply(step)
        return step

    def plan(self, tensors: Mapping[str, tuple[Shape, torch.dtype]]) -> Plan:
        """Plan how to make the map's targets from tensors of these shapes and dtypes, without reading any of them.

        Raises:
            ConfigError: naming tensors that are missing, left over, of a wrong shape, or used or produced twice.
        """
        step = self.trace(tensors)
        wrong = [*step.wrong, *(f"{name}: nothing takes it" for name in step.left)]
        if wrong:
            raise ConfigError("The tensors don't fit the state map:\n  " + format_list(wrong, 8, "\n  "))
        return Plan(step.given)

    def __rshift__(self, then: StateMap) -> StateMap:
        return Chain((*_steps(self), *_steps(then)))

    def __or__(self, beside: StateMap) -> StateMap:
        return Together((*_rules(self), *_rules(beside)))


@dataclass(frozen=True)
class Chain(StateMap):
    """Maps in order. Each takes some of the tensors that the previous ones left or gave."""

    steps: tuple[StateMap, ...]

    def apply(self, step: Step) -> None:
        at_hand, untouched = dict(step.tensors), set(step.tensors)
        for one in self.steps:
            inner = Step(at_hand)
            one.apply(inner)
            stays = {name: at_hand[name] for name in inner.left}
            step.wrong += inner.wrong
            step.wrong += [f"{name}: given, but it exists already" for name in inner.given if name in stays]
            at_hand = {**stays, **inner.given}
            untouched -= inner.taken
        step.take(*(name for name in step.tensors if name not in untouched))
        for name, view in at_hand.items():
            if name not in untouched:
                step.give(name, view)

    def inverse(self) -> StateMap:
        return Chain(tuple(one.inverse() for one in reversed(self.steps)))


@dataclass(frozen=True)
class Together(StateMap):
    """Maps side by side: each takes its own tensors from the same set."""

    rules: tuple[StateMap, ...]

    def apply(self, step: Step) -> None:
        for one in self.rules:
            one.apply(step)

    def inverse(self) -> StateMap:
        return Together(tuple(one.inverse() for one in self.rules))


def _steps(one: StateMap) -> tuple[StateMap, ...]:
    return one.steps if isinstance(one, Chain) else (one,)


def _rules(one: StateMap) -> tuple[StateMap, ...]:
    return one.rules if isinstance(one, Together) else (one,)


@dataclass(frozen=True)
class Group:
    """Tensors that depend on each other: these sources make these targets and no others."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The tensors that a map gives, made from stored ones when they are read."""

    targets: Mapping[str, View]

    def read(self, target: str, fetch: Fetch, box: Box | None = None) -> Tensor:
        """A target, or a range of it. Fetches only the ranges of sources that it needs.

        Args:
            target: its name.
            fetch: reads a range of a source; within one call, no byte is fetched twice.
            box: first index and end index of each dimension; the whole tensor by default.
        """
        view = self.targets[target]
        return read(view, whole(view.shape) if box is None else box, fetch)

    def read_into(self, out: Tensor, target: str, fetch: Fetch, box: Box | None = None) -> None:
        """Like `read`, but into `out`, which has the range's shape, in `out`'s dtype. Joining takes no extra memory."""
        view = self.targets[target]
        write(view, whole(view.shape) if box is None else box, out, fetch)

    def reads(self, target: str, box: Box | None = None) -> list[tuple[str, Box]]:
        """The ranges of sources that `read` fetches."""
        view = self.targets[target]
        return [*reads(view, whole(view.shape) if box is None else box)]

    def stream(self, fetch: Fetch) -> Iterator[tuple[str, Tensor]]:
        """All targets, one by one and group by group, so that memory needs to hold only one group at a time."""
        return ((name, self.read(name, fetch)) for group in self.groups for name in group.targets)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups, in the order of the targets."""
        sources = {name: [*dict.fromkeys(source for source, _ in self.reads(name))] for name in self.targets}
        leader: dict[str, str] = {}

        def find(source: str) -> str:
            while (up := leader.setdefault(source, source)) != source:
                source = up
            return source

        for some in sources.values():
            for other in some[1:]:
                leader[find(other)] = find(some[0])
        members: dict[str, list[str]] = {}
        for name, some in sources.items():
            members.setdefault(find(some[0]) if some else f"\0{name}", []).append(name)
        return tuple(
            Group(_unique(source for name in names for source in sources[name]), tuple(names))
            for names in members.values()
        )


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))

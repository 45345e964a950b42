"""Operations on names: which tensors become which. Names are templates: `layers.{i}.mlp.{kind}` stands for all names of
that form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from forge_train.base.errors import ConfigError

from .maps import StateMap, Step
from .names import Bindings, same_placeholders, template
from .strided import EveryNth, TakingTurns
from .views import Joined, Selected, Unsqueezed, View


@dataclass(frozen=True)
class Rename(StateMap):
    """Other names for the same tensors.

    Args:
        names: name → new name. A name without placeholders must exist; a template may match nothing.
    """

    names: Mapping[str, str]

    def __post_init__(self) -> None:
        for old, new in self.names.items():
            same_placeholders("Rename", (old, new))

    def apply(self, step: Step) -> None:
        for old, new in self.names.items():
            for name, bindings in template(old).find(step.tensors).items():
                for view in step.take(name):
                    step.give(template(new).fill(bindings), view)

    def inverse(self) -> StateMap:
        if len(set(self.names.values())) < len(self.names):
            raise ConfigError("Rename gives one name twice, so it has no inverse.")
        return Rename({new: old for old, new in self.names.items()})


@dataclass(frozen=True)
class Drop(StateMap):
    """Drops tensors that are not needed, such as tables of rotary positions. Its inverse does nothing."""

    names: tuple[str, ...]

    def apply(self, step: Step) -> None:
        for text in self.names:
            for name in template(text).find(step.tensors):
                if name in step.tensors:
                    step.take(name)

    def inverse(self) -> StateMap:
        return Drop(())


@dataclass(frozen=True)
class Stack(StateMap):
    """Stacks many tensors of the same shape along a new first dimension.

    Args:
        each: the tensors to stack, such as `experts.{e}.up`; the numbers must run from 0.
        whole: the stack, such as `experts.up`, with the same placeholders except the number.
    """

    each: str
    whole: str

    def __post_init__(self) -> None:
        _over(self.each, self.whole)

    def apply(self, step: Step) -> None:
        over = _over(self.each, self.whole)
        stacks: dict[str, dict[str, Bindings]] = defaultdict(dict)
        for bindings in template(self.each).find(step.tensors).values():
            stacks[template(self.whole).fill(bindings)][bindings[over]] = bindings
        for name, found in stacks.items():
            bindings = next(iter(found.values()))
            numbers = [str(number) for number in range(len(found))]
            odd = [template(self.each).fill(found[one]) for one in sorted(found.keys() - {*numbers})]
            step.take(*odd)
            step.wrong += [f"{one}: {name} has {len(found)} parts, numbered from 0" for one in odd]
            rows = step.take(*(template(self.each).fill({**bindings, over: one}) for one in numbers))
            if alike(step, name, rows):
                step.give(name, Joined.of(((Unsqueezed.of(row, 0), 0, 1) for row in rows), 0))

    def inverse(self) -> StateMap:
        return Unstack(self.whole, self.each)


@dataclass(frozen=True)
class Unstack(StateMap):
    """Takes a tensor apart along its first dimension, which disappears; the inverse of `Stack`."""

    whole: str
    each: str

    def __post_init__(self) -> None:
        _over(self.each, self.whole)

    def apply(self, step: Step) -> None:
        over = _over(self.each, self.whole)
        for name, bindings in template(self.whole).find(step.tensors).items():
            for view in step.take(name):
                if has_dims(step, name, view, 0):
                    for index in range(view.shape[0]):
                        each = template(self.each).fill({**bindings, over: str(index)})
                        step.give(each, Selected.of(view, 0, index))

    def inverse(self) -> StateMap:
        return Stack(self.each, self.whole)


@dataclass(frozen=True)
class Concat(StateMap):
    """Fuses several tensors along a dimension, such as the projections of queries, keys and values.

    Args:
        parts: names of the parts, in their order.
        whole: name of the fused tensor.
        dim: the dimension, from 0.
        shares: proportions of the parts' lengths, which the inverse needs; equal by default.
        groups: number of groups that each part is cut into; the first group of every part comes first, then the second.
            0 interleaves the parts entry by entry, or as finely as the shares allow.
    """

    parts: tuple[str, ...]
    whole: str
    dim: int = 0
    shares: tuple[int, ...] = ()
    groups: int = 1

    def __post_init__(self) -> None:
        _check_fused(self.parts, self.whole, self.shares)

    def apply(self, step: Step) -> None:
        found = [one for part in self.parts for one in template(part).find(step.tensors).values()]
        for name, bindings in {template(self.whole).fill(one): one for one in found}.items():
            views = step.take(*(template(part).fill(bindings) for part in self.parts))
            if alike(step, name, views, but=self.dim):
                groups = _groups(length := sum(view.shape[self.dim] for view in views), self)
                bounds = _bounds(length, self)
                if [view.shape[self.dim] for view in views] != [groups * (b - a) for a, b in pairwise(bounds)]:
                    lengths = " and ".join(str(view.shape[self.dim]) for view in views)
                    step.wrong.append(f"{name}: parts of {lengths} are not in the proportion {_shares(self)}")
                    continue
                if _turns(bounds, groups):
                    step.give(name, TakingTurns.of(tuple(views), self.dim))
                    continue
                spans = [(view, b - a) for view, (a, b) in zip(views, pairwise(bounds), strict=True)]
                pieces = [(view, g * size, (g + 1) * size) for g in range(groups) for view, size in spans]
                step.give(name, Joined.of(pieces, self.dim))

    def inverse(self) -> StateMap:
        return Split(self.whole, self.parts, self.dim, self.shares, self.groups)


@dataclass(frozen=True)
class Split(StateMap):
    """Splits a fused tensor; the inverse of `Concat`."""

    whole: str
    parts: tuple[str, ...]
    dim: int = 0
    shares: tuple[int, ...] = ()
    groups: int = 1

    def __post_init__(self) -> None:
        _check_fused(self.parts, self.whole, self.shares)

    def apply(self, step: Step) -> None:
        for name, bindings in template(self.whole).find(step.tensors).items():
            for view in step.take(name):
                if not has_dims(step, name, view, self.dim):
                    continue
                bounds = _bounds(length := view.shape[self.dim], self)
                groups = _groups(length, self)
                if bounds[-1] * groups != length:
                    step.wrong.append(f"{name}: {length} can't be split {_shares(self)} in {groups} groups")
                    continue
                for part, (a, b) in zip(self.parts, pairwise(bounds), strict=True):
                    starts = range(0, length, bounds[-1])
                    if _turns(bounds, groups):
                        step.give(template(part).fill(bindings), EveryNth.of(view, self.dim, a, len(self.parts)))
                        continue
                    pieces = [(view, start + a, start + b) for start in starts]
                    step.give(template(part).fill(bindings), Joined.of(pieces, self.dim))

    def inverse(self) -> StateMap:
        return Concat(self.parts, self.whole, self.dim, self.shares, self.groups)


def _over(each: str, whole: str) -> str:
    """The placeholder over which tensors are stacked."""
    more = template(each).placeholders - template(whole).placeholders
    if len(more) != 1 or template(whole).placeholders - template(each).placeholders:
        raise ConfigError(f"{each!r} must have one placeholder more than {whole!r}: the number in the stack.")
    return next(iter(more))


def _check_fused(parts: tuple[str, ...], whole: str, shares: tuple[int, ...]) -> None:
    same_placeholders("Concat and Split", (whole, *parts))
    if shares and (len(shares) != len(parts) or min(shares) < 1):
        raise ConfigError(f"{whole!r}: expected {len(parts)} shares of at least 1, found {shares}.")


def _bounds(length: int, fused: Concat | Split) -> list[int]:
    """Return the boundaries of the parts within the first group."""
    shares = fused.shares or (1,) * len(fused.parts)
    unit = length // max(sum(shares) * _groups(length, fused), 1)
    return [unit * share for share in accumulate(shares, initial=0)]


def _groups(length: int, fused: Concat | Split) -> int:
    return fused.groups or length // sum(fused.shares or (1,) * len(fused.parts))


def _turns(bounds: list[int], groups: int) -> bool:
    """Return True if each part has one index in each of several groups: a piece per group would be slow to read."""
    return groups > 1 and bounds == [*range(len(bounds))]


def _shares(fused: Concat | Split) -> str:
    return " : ".join(map(str, fused.shares or (1,) * len(fused.parts)))


def alike(step: Step, name: str, views: list[View], but: int | None = None) -> bool:
    """Return True if the tensors, if any, can be joined: same dtype, and same shape except in one dimension."""
    if but is not None and not all(has_dims(step, name, view, but) for view in views):
        return False
    kinds = {(str(one.dtype), *(size for dim, size in enumerate(one.shape) if dim != but)) for one in views}
    if len(kinds) > 1:
        words = " and ".join(" × ".join(map(str, kind)) for kind in sorted(kinds))
        step.wrong.append(f"{name}: its parts differ: {words}")
    return len(kinds) == 1


def has_dims(step: Step, name: str, view: View, *dims: int) -> bool:
    """Return True if a tensor has these dimensions, counted from 0."""
    wrong = [dim for dim in dims if not 0 <= dim < len(view.shape)]
    step.wrong += [f"{name}: there is no dimension {dim} in {list(view.shape)}" for dim in wrong]
    return not wrong

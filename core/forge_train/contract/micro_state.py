"""State that plugins keep for a micro-batch during a step, by typed key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from ..ground.errors import PluginError
from ..ground.present import few
from .cuts import ROWS, TOKENS, Axes, AxesSpec, Leaf, Replicate, Spec, Split, Stack, spec_of
from .trees import combine_trees

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class StateKey(Generic[T]):
    """A name in the state of a step, the axes of its tensors, and their type.

    Keys that are equal mean the same value, so that plugins which share one need not import each other.

    Args:
        name: by custom `plugin.name`.
        axes: which axes of each tensor count sequences and positions: `Axes(batch=None)` for what is the same in every
            micro-batch, `Stack()` for one entry for each micro-batch. A nested value has one for all of its tensors, or
            one for each.
    """

    name: str
    axes: AxesSpec = ROWS


class Scope:
    """Of a step: what is kept for it can be used while it is open."""

    def __init__(self) -> None:
        self.open = True


@dataclass(eq=False)
class MicroState:
    """State that plugins keep for a micro-batch during a step: `batch.state[KEY]`.

    A tensor written in a forward pass keeps its graph; detach it if you only read it.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    """Name → its `StateKey`."""
    values: dict[str, Any] = field(default_factory=dict)
    scope: Scope | None = None
    extent: Tensor | None = None
    """Of the size of the batch, `[batch, sequence]`, on the meta device. It is cut with the batch."""

    def __getitem__(self, key: StateKey[T]) -> T:
        """The micro-batch's part of a value.

        Raises:
            PluginError: if nobody wrote it on this rank, or there is no step.
        """
        self._check(key)
        if key.name not in self.values:
            raise PluginError(missing(key, self.values))
        return cast(T, self.values[key.name])

    def __setitem__(self, key: StateKey[T], value: T) -> None:
        """Keep a value, in the place of an earlier one.

        Raises:
            PluginError: if there is no step, or the value is not of the size of the batch.
        """
        self._check(key)
        if self.extent is not None:
            rows, positions = self.extent.shape
            check_sizes(key, value, Sizes("the micro-batch has", rows, positions))
        self.keys = {**self.keys, key.name: key}  # parts of a cut batch share the dictionary
        self.values[key.name] = value

    def __contains__(self, key: StateKey[Any]) -> bool:
        """Return True if the key was written on this rank."""
        self._check(key)
        return key.name in self.values

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def map(self, change: Callable[[Tensor], Tensor]) -> MicroState:
        """The same of changed tensors."""
        values = {name: each_tensor(self.keys[name], value, of_tensor(change)) for name, value in self.values.items()}
        return MicroState(self.keys, values, self.scope, self.extent)

    def spec(self, leaf: Callable[[Axes], Leaf]) -> dict[str, Spec]:
        """Its own spec, for `shard_tree`.

        Args:
            leaf: gives that of a tensor from its axes.
        """

        def one(axes: Axes | Stack) -> Leaf:
            return Replicate() if isinstance(axes, Stack) else leaf(axes)

        values = {name: spec_of(key.axes, one) for name, key in self.keys.items()}
        return {"keys": Replicate(), "values": values, "scope": Replicate(), "extent": leaf(TOKENS)}

    def _check(self, key: StateKey[Any]) -> None:
        check_key(key)
        if self.scope is None or not self.scope.open:
            raise PluginError(outside(key, "batch.state"))
        if (known := self.keys.get(key.name, key)) != key:
            raise PluginError(f"The step's state {key.name!r} is written with {known.axes}, and used with {key.axes}.")


POSITIONS: StateKey[Tensor] = StateKey("forge.positions", Axes(batch=None, sequence=0))
"""Positions of a micro-batch within its full rows, `[sequence]` int64."""


SAMPLES: StateKey[Tensor] = StateKey("forge.samples", ROWS)
"""The number of each sequence of a micro-batch in the stream of all training data, `[batch]` int64: the same on every
layout. It is there after a call of `job.step_state.number_samples()`."""


def check_key(key: object) -> None:
    """Check that a key is a `StateKey`: from a name alone, the axes would be unknown."""
    if not isinstance(key, StateKey):
        raise PluginError(
            f"The state of a step is asked with a StateKey, found {key!r}: KEY = StateKey({key!r}, axes)."
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a state's tensors along their axes."""

    whose: str
    """For messages."""
    batch: int
    sequence: int | None
    """None if it is not the same in all of them."""
    parts: Sequence[int] = ()
    """Sequences of each micro-batch, where there are several."""


def check_sizes(key: StateKey[Any], value: Any, sizes: Sizes) -> None:
    """Check that each tensor has the expected number of sequences and positions.

    Raises:
        PluginError: if not; names the key, its size and the expected size.
    """
    name = f"The step's state {key.name!r}"

    def compare(words: str, size: int) -> Callable[[str, Leaf, Sequence[Any]], Any]:
        def one(path: str, leaf: Leaf, values: Sequence[Any]) -> Any:
            (tensor,) = values
            if isinstance(leaf, (Replicate, Stack)):
                return tensor
            what = name if path == "the tree" else f"{name}, at {path},"
            summed = words == "rows" and 1 < len(sizes.parts) <= 16
            sums = f" ({' + '.join(map(str, sizes.parts))})" if summed else ""
            expected = f"{sizes.whose} {size}{sums}"
            if not is_tensor(tensor):
                raise PluginError(f"{what} is {tensor!r:.40}, and must be a tensor with {words}; {expected}.")
            shape = list(tensor.shape)
            if not -len(shape) <= leaf.dim < len(shape):
                raise PluginError(f"{what} is {shape}, without axis {leaf.dim} for {words}; {expected}.")
            if shape[leaf.dim] != size:
                of = "" if len(shape) == 1 else f" (axis {leaf.dim} of {shape})"
                raise PluginError(f"{what} has {shape[leaf.dim]} {words}{of}; {expected}.")
            return tensor

        return one

    def along(axis: Literal["batch", "sequence"]) -> Spec:
        return spec_of(key.axes, lambda axes: axes if isinstance(axes, Stack) else axes.along(axis))

    try:
        combine_trees(compare("rows", sizes.batch), along("batch"), [value])
        if sizes.sequence is not None:
            combine_trees(compare("positions", sizes.sequence), along("sequence"), [value])
    except PluginError as error:
        if str(error).startswith(name):
            raise
        raise PluginError(f"{name}: {error}") from error


def outside(key: StateKey[Any], where: str) -> str:
    return (
        f"{where} was asked for {key.name!r}, and there is no step: it lasts from prepare_batch to on_step, and in an "
        "evaluation for each global batch."
    )


def missing(key: StateKey[Any], known: Iterable[str]) -> str:
    names = few(sorted({*known} - {POSITIONS.name, SAMPLES.name})) or "nothing"
    return (
        f"The step's state has no {key.name!r} on this rank; there is {names}. What is written in a forward pass or a "
        "loss stays on the ranks of its pipeline stage: ask `KEY in job.step_state` first."
    )


def each_tensor(key: StateKey[Any], value: Any, change: Callable[[Any], Any]) -> Any:
    """A value of changed leaves."""
    return combine_trees(lambda path, leaf, values: change(values[0]), spec_of(key.axes, lambda axes: Split()), [value])


def of_tensor(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """A change of tensors that leaves other values as they are."""
    return lambda one: change(one) if is_tensor(one) else one


def is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)

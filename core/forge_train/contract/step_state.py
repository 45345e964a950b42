"""State that plugins keep for the global batch during a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..ground.errors import PluginError
from .cuts import Axes, Leaf, Replicate, Span, Stack, spec_of
from .micro_state import (
    POSITIONS,
    SAMPLES,
    MicroState,
    Scope,
    Sizes,
    StateKey,
    check_key,
    check_sizes,
    each_tensor,
    is_tensor,
    missing,
    of_tensor,
    outside,
)
from .trees import shard_tree, unshard_tree

if TYPE_CHECKING:
    from ..processes.distributed import DistributedContext
    from .batch import Batch
    from .transform import MicroBatch

T = TypeVar("T")


class StepState:
    """State that plugins keep for the global batch during a step: `job.step_state[KEY]`.

    A value that a `PrepareStep` writes is split with the batches: each micro-batch has its part in `batch.state`, split
    along sequences, and under context parallelism along positions. Values written per micro-batch are joined when read
    here. The state is cleared after `on_step`, and after each global batch of an evaluation.
    """

    def __init__(self) -> None:
        self._scope: Scope | None = None
        self._states: list[MicroState] = []
        self._rows: list[int] = []
        self._passing: MicroState | None = None
        self.numbers_samples = False
        """True if `SAMPLES` was requested."""

    def __deepcopy__(self, _: object) -> StepState:
        """A copied module shares the state of the step with the original."""
        return self

    # -- for plugins --

    def number_samples(self) -> None:
        """Make Forge write `batch.state[SAMPLES]` from the next step on, for modules whose random numbers are a
        function of the sample."""
        self.numbers_samples = True

    def __getitem__(self, key: StateKey[T]) -> T:
        """A value for this rank's micro-batches together, without a graph; a context-parallel rank has its slice.

        Raises:
            PluginError: if it was not written for each of them on this rank, or there is no step.
        """
        import torch

        with torch.no_grad():
            joined = _joined(key, self._values(key), _joining, "micro-batches")
        return cast(T, _detached(joined, key))

    def __setitem__(self, key: StateKey[T], value: T) -> None:
        """Keep a value for this rank's micro-batches, whole sequences: for a `PrepareStep`.

        Raises:
            PluginError: if it does not fit them, or the first forward pass may have begun.
        """
        self._check(key)
        if not self._rows:
            raise PluginError(
                f"The step's state {key.name!r} was written for the global batch after its batches were cut: write it "
                "in a PrepareStep, or for each micro-batch with batch.state."
            )

        lengths = {state.extent.shape[1] for state in self._states if state.extent is not None}
        length = lengths.pop() if len(lengths) == 1 else None
        check_sizes(key, value, Sizes("the step's batches have", sum(self._rows), length, self._rows))

        def cut(axes: Axes | Stack) -> Leaf:
            return axes if isinstance(axes, Stack) else axes.along("batch", self._rows)

        try:
            parts = shard_tree(value, spec_of(key.axes, cut), len(self._states))
        except PluginError as error:
            raise PluginError(f"The step's state {key.name!r}, of {self._rows} sequences: {error}") from error
        for state, part in zip(self._states, parts, strict=True):
            state[key] = part

    def __contains__(self, key: StateKey[Any]) -> bool:
        """Return True if the key was written on this rank for at least one micro-batch."""
        self._check(key)
        return any(key in state for state in self._states)

    @property
    def micro(self) -> MicroState | None:
        """The state of the micro-batch that passes through the model, forward or backward, for a module, which is not
        given the batch. None where there is no step (text is generated), or the executor does not say which it is.
        In a `PrepareStep` it raises a PluginError: no micro-batch passes through the model yet."""
        if self._rows and self._passing is None:
            raise PluginError(
                "job.step_state.micro was asked for while the step's batches are prepared, and none passes through the "
                "model yet: in a PrepareStep, write job.step_state[KEY] for all of them, or batch.state[KEY] for one."
            )
        return self._passing

    def gather(self, key: StateKey[T], dist: DistributedContext) -> T:
        """A value for the global batch of all ranks, in the order of the data, with whole sequences.

        Every data-parallel and context-parallel rank of the stage has to call it.

        Raises:
            PluginError: as when it is read, or if context-parallel ranks differ in what has no axis of positions.
        """
        values = [_detached(one, key) for one in self._values(key)]
        found = [self._whole(key, value, state, dist) for value, state in zip(values, self._states, strict=True)]
        everybody = [part for one in found for part in _from_all(one, key, dist, "dp")]
        return cast(T, _joined(key, everybody, _joining, "micro-batches"))

    # -- for the engine --

    def begin(self, batches: Sequence[Batch], *, sliced: bool) -> list[Batch]:
        """The kernel begins a step: its batches with a state each.

        Args:
            batches: of this rank, of whole sequences.
            sliced: whether sequences are going to be cut.
        """
        import torch

        self.end()
        self._scope = Scope()
        extents = [torch.empty(batch.inputs.shape[:2], dtype=torch.bool, device="meta") for batch in batches]
        self._states = [MicroState(scope=self._scope, extent=extent) for extent in extents]
        self._rows = [len(batch.inputs) for batch in batches]
        if sliced:
            for batch, state in zip(batches, self._states, strict=True):
                state[POSITIONS] = torch.arange(batch.inputs.shape[1])
        return [replace(batch, state=state) for batch, state in zip(batches, self._states, strict=True)]

    def use(self, batches: Sequence[Batch]) -> None:
        """The kernel has cut or moved the batches: from here on, values are theirs."""
        self._states, self._rows = [batch.state for batch in batches], []

    def number(self, batches: Sequence[Batch], first: Sequence[int]) -> None:
        """Number the sequences of each micro-batch, starting with that of its first one. The kernel calls this."""
        import torch

        for batch, start in zip(batches, first, strict=True):
            batch.state[SAMPLES] = torch.arange(start, start + len(batch.inputs))

    def passes(self, micro: MicroBatch | Batch | None) -> None:
        """The kernel hears from the executor what passes through the model."""
        self._passing = micro.state if micro else None

    def end(self) -> None:
        """The kernel ends a step: everything is forgotten."""
        if self._scope is not None:
            self._scope.open = False
        self._scope, self._states, self._rows, self._passing = None, [], [], None

    def _check(self, key: StateKey[Any]) -> None:
        check_key(key)
        if self._scope is None:
            raise PluginError(outside(key, "job.step_state"))

    def _values(self, key: StateKey[Any]) -> list[Any]:
        self._check(key)
        found = [state for state in self._states if key in state]
        if not found:
            raise PluginError(missing(key, [name for state in self._states for name in state]))
        if len(found) < len(self._states):
            raise PluginError(
                f"The step's state {key.name!r} was written for {len(found)} of {len(self._states)} micro-batches; "
                "it is read for all of them when each has passed."
            )
        return [state[key] for state in found]

    def _whole(self, key: StateKey[Any], value: Any, state: MicroState, dist: DistributedContext) -> Any:
        """A micro-batch's value with whole sequences."""
        if POSITIONS not in state:
            return value
        spans = [_spans(one.tolist()) for one in dist.gather_tensors(state[POSITIONS], "cp")]

        def join(axes: Axes | Stack) -> Leaf:
            return Replicate() if isinstance(axes, Stack) else axes.along("sequence", spans=spans)

        return _joined(
            key,
            _from_all(value, key, dist, "cp"),
            join,
            "context-parallel ranks, which must agree on what has no axis of positions",
        )


def _joining(axes: Axes | Stack) -> Leaf:
    return axes if isinstance(axes, Stack) else axes.along("batch")


def _joined(key: StateKey[T], values: Sequence[T], leaf: Callable[[Axes | Stack], Leaf], of: str) -> T:
    try:
        return unshard_tree(values, spec_of(key.axes, leaf))
    except PluginError as error:
        what = str(error).removeprefix("the tree: ")
        raise PluginError(f"The step's state {key.name!r} can't be joined from its {of}: {what}") from error


def _detached(value: Any, key: StateKey[Any]) -> Any:
    return each_tensor(key, value, of_tensor(lambda tensor: tensor.detach()))


def _from_all(value: Any, key: StateKey[Any], dist: DistributedContext, axis: str) -> list[Any]:
    """A micro-batch's value on each rank along an axis."""
    gathered: list[list[Any]] = []

    def gather(leaf: Any) -> None:
        gathered.append(dist.gather_tensors(leaf, axis) if is_tensor(leaf) else dist.gather_objects(leaf, axis))

    each_tensor(key, value, gather)
    ranks = len(gathered[0]) if gathered else 1
    return [_in_order(value, key, [own[at] for own in gathered]) for at in range(ranks)]


def _in_order(value: Any, key: StateKey[Any], leaves: Sequence[Any]) -> Any:
    """A value like another, with other leaves."""
    rest = iter(leaves)
    return each_tensor(key, value, lambda _: next(rest))


def _spans(positions: Sequence[int]) -> list[Span]:
    """Runs of consecutive positions."""
    found: list[Span] = []
    for at in positions:
        if found and found[-1][1] == at:
            found[-1] = (found[-1][0], at + 1)
        else:
            found.append((at, at + 1))
    return found

"""The results of what plugins gave, checked at every call: types and sizes only, so that the host waits for nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ..base.errors import PluginError, locate
from ..base.format import place
from ..base.names import HookOrigin
from ..contract.batch import Batch, BatchPhase, Preparation, PrepareStep
from ..contract.protocols import Span
from .calls import Implementations
from .inspection import Inspection, ReturnCheck

if TYPE_CHECKING:
    from ..mesh.distributed import DistributedContext


class Prepare(Protocol):
    """Function that prepares a loader's micro-batches for a step; `first` is the number of its first sequence."""

    def __call__(self, batches: Sequence[Batch], first: int = 0) -> list[Batch]: ...


class Guarded:
    """An object of a plugin that is used as it is, but for its methods' results, which are checked.

    Args:
        inner: the object.
        kinds: method → what it must give.
        whose: the plugin and the hook, for messages.
    """

    def __init__(self, inner: Any, kinds: Mapping[str, ReturnCheck], whose: HookOrigin) -> None:
        self._inner = inner
        for name, kind in kinds.items():
            if name == "__call__":
                self._call = guarded(inner, kind, whose, "the function")
            elif kind.words != "None":
                setattr(self, name, guarded(getattr(inner, name), kind, whose, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self._call(*arguments, **more)


def guarded(function: Callable[..., Any], kind: ReturnCheck, whose: HookOrigin, name: str) -> Callable[..., Any]:
    """A function whose results are checked."""
    problem = kind.problem

    @functools.wraps(function)
    def checked(*arguments: Any, **more: Any) -> Any:
        try:
            value = function(*arguments, **more)
        except Exception as error:
            pass_through(error, whose)
            raise
        if text := problem(value):
            wrong = PluginError(f"{whose}: {name} ({place(function)}) must return {kind.words}, {text}.")
            locate(wrong, plugin=whose.plugin, hook=whose.hook)
            raise wrong
        return value

    return checked


def first_state(stateful: Any, whose: HookOrigin, inspection: Inspection) -> dict[str, Any]:
    """Return the initial state of a slot's object; called early, so that an error does not wait for the first save."""
    state: dict[str, Any] = guarded(stateful.state_dict, inspection.of(dict[str, Any]), whose, "state_dict")()
    return state


def preparing(
    source: HookOrigin, given: Sequence[tuple[str, Preparation]], calls: Implementations, dist: DistributedContext
) -> Prepare:
    """Combine what plugins do to the batches of a step into one function.

    Args:
        source: plugin and hook that supply the loader, for messages.
        given: changes, each with its plugin's name, ordered by that name.
        calls: the calls of plugins, which blame them for failures.
        dist: says which of a step's sequences this rank has.
    """
    import torch

    hook, loaded = "prepare_batch", calls.inspection.of_batch()

    def checked(name: str, one: Preparation, kind: ReturnCheck) -> Callable[..., Any]:
        return calls.blamed(hook, name, guarded(one.apply, kind, calls.whose(hook, name), "the function"))

    changes = sorted(((one.phase, name, one) for name, one in given if not isinstance(one, PrepareStep)), key=_phase)
    steps = [
        (phase, calls.whose(hook, name), checked(name, one, calls.inspection.of_batch()))
        for phase, name, one in changes
    ]
    making = [step for phase, _, step in steps if phase < BatchPhase.SLICE]
    slicing = [(whose, step) for phase, whose, step in steps if phase >= BatchPhase.SLICE]
    together = [
        (calls.whose(hook, name), checked(name, one, calls.inspection.of_batches()))
        for name, one in given
        if isinstance(one, PrepareStep)
    ]

    def made(batch: Batch) -> Batch:
        for step in making:
            batch = step(batch)
        return batch

    def sliced(batch: Batch) -> Batch:
        for whose, step in slicing:
            before, batch = batch, step(batch)
            length, kept = before.inputs.shape[1], batch.inputs.shape[1]
            known = -1 if batch.positions is None else len(batch.positions)
            if known != kept and (kept != length or before.positions is not None):
                raise PluginError(
                    f"{whose}: the function cut a batch from {length} to {kept} positions by hand; cut it with "
                    'batch.slice("sequence", (start, stop), …), which cuts every tensor.'
                )
        return batch

    rank, ranks = dist.data_rank, dist.data_ranks  # which read the mesh

    def prepare(batches: Sequence[Batch], first: int = 0) -> list[Batch]:
        for batch in batches:
            if text := loaded.problem(batch):
                raise PluginError(f"{source}: the loader must give {loaded.words}, {text}.")

        def numbered(at: int, batch: Batch) -> Batch:
            rows, own, ids = len(batches[at].inputs) or 1, batches[at].sample_ids, torch.arange(len(batch.inputs))
            row = ids * rows // (len(ids) or 1)  # a preparation may have made several rows of a sequence
            start = first + (at * ranks + rank) * rows if own is None else own[row] - row
            return replace(batch, sample_ids=start * len(ids) // rows + ids)

        ready = [numbered(at, made(numbered(at, batch))) for at, batch in enumerate(batches)]
        for whose, change in together:
            count, ready = len(ready), list(change(ready))
            if len(ready) != count:
                raise PluginError(
                    f"{whose}: a PrepareStep must return as many batches as it is given, {count}; found {len(ready)}."
                )
        return [numbered(at, sliced(batch)) for at, batch in enumerate(ready)]

    return prepare


def _phase(step: tuple[BatchPhase, str, object]) -> BatchPhase:
    return step[0]


def nesting(name: str, spans: Sequence[tuple[HookOrigin, Span]], inside: list[str], context: ReturnCheck) -> Span:
    """Functions that make context managers as one, whose managers are nested in their order.

    Args:
        name: of the span.
        spans: a function for each plugin, and whose it is, for messages.
        inside: the spans that the run is in; this one, while it lasts.
        context: check of what the functions make.
    """
    factories = [guarded(span, context, whose, "the function") for whose, span in spans]
    if not factories:
        return nullcontext

    @contextmanager
    def nested() -> Iterator[None]:
        inside.append(name)
        try:
            with ExitStack() as stack:
                for factory in factories:
                    stack.enter_context(factory())
                yield
        finally:
            inside.pop()

    return nested


def pass_through(error: BaseException, whose: HookOrigin) -> None:
    """Note on an exception that it came out of a function which a plugin's hook gave."""
    error.passed = (*getattr(error, "passed", ()), whose)  # type: ignore[attr-defined]

"""The results of what plugins gave, checked at every call: types and sizes only, so that the host waits for nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from ..ground.errors import PluginError
from ..ground.places import place
from .batch import Batch
from .protocols import Span
from .returns import CONTEXT, Kind, kind_of, results

Change = Callable[[Batch], Batch]


class Guarded:
    """An object of a plugin that is used as it is, but for its methods' results, which are checked.

    Args:
        inner: the object.
        protocol: says what each method must give.
        whose: the plugin and the hook, for messages.
    """

    def __init__(self, inner: Any, protocol: type, whose: str) -> None:
        self._inner = inner
        for name, kind in results(protocol).items():
            if kind.words != "None":
                setattr(self, name, guarded(getattr(inner, name), kind, whose, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def guarded(function: Callable[..., Any], kind: Kind, whose: str, name: str) -> Callable[..., Any]:
    """A function whose results are checked."""
    problem = kind.problem

    @functools.wraps(function)
    def checked(*arguments: Any, **more: Any) -> Any:
        value = function(*arguments, **more)
        if text := problem(value):
            raise PluginError(f"{whose}: {name} ({place(function)}) must return {kind.words}, {text}.")
        return value

    return checked


def preparing(source: str, steps: Sequence[tuple[str, Change]]) -> Change:
    """Functions for batches as one.

    Args:
        source: whose loader gives the batches, for messages.
        steps: the functions in order, each with whose it is.
    """
    given = _first_batch()
    checked = [guarded(step, _first_batch(), whose, "the function") for whose, step in steps]

    def prepare(batch: Batch) -> Batch:
        if text := given.problem(batch):
            raise PluginError(f"{source}: the loader must give {given.words}, {text}.")
        for step in checked:
            batch = step(batch)
        return batch

    return prepare


def nesting(spans: Sequence[tuple[str, Span]]) -> Span:
    """Functions that make context managers as one, whose managers are nested in their order."""
    factories = [guarded(span, CONTEXT, whose, "the function") for whose, span in spans]
    if not factories:
        return nullcontext

    @contextmanager
    def nested() -> Iterator[None]:
        with ExitStack() as stack:
            for factory in factories:
                stack.enter_context(factory())
            yield

    return nested


def _first_batch() -> Kind:
    """A batch, of which the first is looked at field by field and axis by axis, and the others by their type."""
    kind, seen = kind_of(Batch), False

    def problem(value: Any) -> str:
        nonlocal seen
        if seen and isinstance(value, Batch):
            return ""
        seen = True
        if text := kind.problem(value):
            return text
        return f"found one that does not fit together: {wrong}" if (wrong := value.problem()) else ""

    return Kind(kind.words, problem)

"""Hook specs: a typed function declares a hook, and calling it calls the plugins that implement the hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypedDict, TypeVar, Unpack, get_args, overload

from ..base.errors import PluginError
from ..base.places import place

if TYPE_CHECKING:
    from .job import Job

Kind = Literal["slot", "chain", "phases", "steps", "spans", "event", "questions"]
Stage = Literal["composition", "step", "run"]
P = ParamSpec("P")
R = TypeVar("R")
_F = Callable[P, R]


@dataclass(eq=False)
class HookSpec(Generic[P, R]):
    """A declared hook. Call it with the arguments of its function, `job` among them, to call those that implement it.

    A slot gives its provider's answer, a chain the one that claims the thing; questions, phases and steps give all
    answers with their plugins' names, phases and steps in order; spans give one function that makes a context manager.
    """

    function: Callable[..., Any]
    kind: Kind
    optional: bool = False
    """True if a slot may stay empty."""
    asked: Stage | None = "run"
    """By when a run calls the hook, if ever: once the model is composed, a step is ready, or the run is over. A plugin
    that implements it in vain is reported then; None if runs need not call it."""
    gives: str = ""
    """Given by a slot's provider to others, unless `Plugin.gives` overrides it."""
    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Taken by a slot's provider from those of other slots, unless `Plugin.takes` overrides it."""
    checked: bool = False
    """True if the results of a returned object's methods are checked at every call, against its protocol."""
    trials: str = ""
    """The module whose `TRIALS` tell `forge plugins check` what to try: hook → pairs of a name and a function."""
    owner: str = ""
    """The distribution that declares the hook, with its version; empty for the kernel."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            where, kinds = place(self.function), ", ".join(get_args(Kind))
            raise PluginError(f"Hook {self.name!r} ({where}) is of an unknown kind {self.kind!r}; kinds are {kinds}.")

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def arguments(self) -> list[str]:
        return list(inspect.signature(self.function).parameters)

    @property
    def declared(self) -> str:
        """` (declared by judge 1.0, judge/specs.py:7)`, for messages; empty for the kernel's."""
        return f" (declared by {self.owner}, {place(self.function)})" if self.owner else ""

    def __call__(self, *positional: P.args, **keywords: P.kwargs) -> R:
        try:
            bound = inspect.signature(self.function).bind(*positional, **keywords)
        except TypeError as error:
            raise PluginError(
                f"Hook {self.name!r}{self.declared} is called with other arguments than "
                f"({', '.join(self.arguments)}): {error}. Install versions of caller and hook that fit each other."
            ) from None
        bound.apply_defaults()
        job: Job = bound.arguments["job"]
        result: R = job.hooks.call(self, bound.arguments)
        return result


class Options(TypedDict, total=False):
    """Properties of a spec besides its kind; see `HookSpec`."""

    optional: bool
    asked: Stage | None
    gives: str
    takes: Mapping[str, tuple[str, ...]]
    checked: bool
    trials: str


@overload
def hookspec(kind: Literal["slot", "event"], **options: Unpack[Options]) -> Callable[[_F[P, R]], HookSpec[P, R]]: ...
@overload
def hookspec(
    kind: Literal["chain", "spans"], **options: Unpack[Options]
) -> Callable[[_F[P, R | None]], HookSpec[P, R]]: ...
@overload
def hookspec(
    kind: Literal["questions"], **options: Unpack[Options]
) -> Callable[[_F[P, R | None]], HookSpec[P, list[tuple[str, R]]]]: ...
@overload
def hookspec(
    kind: Literal["phases", "steps"], **options: Unpack[Options]
) -> Callable[[_F[P, Any]], HookSpec[P, list[tuple[str, Any]]]]: ...
def hookspec(kind: Kind, **options: Unpack[Options]) -> Any:
    """Declare a hook: a function without a body, whose arguments and annotation are what implementations get and give.

    Args:
        kind: how answers are used.
        options: the fields of `HookSpec`.
    """
    return lambda function: HookSpec(function, kind, **options)


def specs_of(module: ModuleType) -> dict[str, HookSpec[..., Any]]:
    """The hooks that a module declares, in the order of the file."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, HookSpec) and value.function.__module__ == module.__name__
    }

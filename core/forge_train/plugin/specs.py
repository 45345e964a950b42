"""Hook specs: a typed function declares a hook, and calling it calls the plugins that implement the hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, Literal, ParamSpec, TypedDict, TypeVar, Unpack, get_args, overload

from ..base.errors import PluginError, nearest
from ..base.format import place

HookKind = Literal["slot", "chain", "phases", "steps", "spans", "event", "questions"]
Stage = Literal["composition", "assembly", "start", "run"]
"""Moments of a run, in their order: the model is composed; optimizer, schedule, data and task are made; every plugin's
`on_start` has returned; the run is over."""
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
    kind: HookKind
    optional: bool = False
    """True if a slot may stay empty, or no plugin need claim a thing that a chain is asked about."""
    required: bool = False
    """True if a slot must be filled in every run that has a plugin of the distribution (or file) which declares it;
    checked before anything slow is imported. An empty slot that is neither optional nor required fails when called."""
    default: str = ""
    """Name of the plugin that fills a slot, or takes what nobody else claims of a chain, where the configuration's
    `[defaults]` don't name one: enabled if the slot is required, or if an enabled plugin has it in `requires`."""
    asked: Stage | None = "run"
    """By when a run has called the hook. A plugin that implements it in vain is reported then; None if runs need not
    call it."""
    observes: bool = False
    """True if implementing it changes no number. A plugin whose hooks all observe is an observer: it is called last,
    its failure is a warning, and runs resume with or without it."""
    starts_only: bool = False
    """True if it acts only where a run begins: a run resumes without a plugin that does nothing else but observe."""
    used_later: bool = False
    """True if a question's answers have code that is called later, so that its failures name the hook."""
    gives: str = ""
    """Given by a slot's provider to others, unless `Plugin.gives` overrides it."""
    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Taken by a slot's provider from those of other slots, unless `Plugin.takes` overrides it."""
    checked: bool = False
    """True if the results of a returned object's methods are checked at every call, against its protocol."""
    suits: str = ""
    """The module whose `suits(hooks, config)` yields a sentence for each reason why a slot's provider does not suit a
    run that is to train; called at setup, before anything slow is imported."""
    keeps: str = ""
    """The module that keeps what a slot's provider reads with a run: `keep(config, hooks, folder, fresh=…)` copies its
    files into `MODEL_FILES` of the run's folder, which each checkpoint copies, and returns the configuration that names
    the copies; `digest(job)` is a text that must be the same when the run resumes."""
    trials: str = ""
    """The module whose `TRIALS` tell `forge plugins check` what to try: hook → pairs of a name and a function."""
    owner: str = ""
    """The distribution that declares the hook, with its version; empty for the kernel."""

    def __post_init__(self) -> None:
        if text := next(self._problems(), ""):
            raise PluginError(f"Hook {self.name!r} ({place(self.function)}) {text}.")

    def _problems(self) -> Iterator[str]:
        if self.kind not in get_args(HookKind):
            yield f"is of an unknown kind {self.kind!r}; kinds are {', '.join(get_args(HookKind))}"
        if self.asked not in (*get_args(Stage), None):
            yield f"says asked={self.asked!r}; write one of {', '.join(map(repr, get_args(Stage)))}, or None"
        for option, kinds in _KINDS.items():
            if getattr(self, option) and self.kind not in kinds:
                yield f"is of the kind {self.kind!r}, where {option!r} has no effect"
        if self.optional and self.required:
            yield "is both optional and required; remove one"
        for one in inspect.signature(self.function).parameters.values():
            if one.kind is not one.POSITIONAL_OR_KEYWORD:
                yield f"takes {_written(one)}; write plain arguments, which implementations get by name"

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
        if "job" not in self.arguments:
            raise PluginError(
                f"Hook {self.name!r}{self.declared} has no argument `job`, so calling its spec reaches no plugins; "
                "pass it to job.hooks.call()."
            )
        bound.apply_defaults()
        result: R = bound.arguments["job"].hooks.call(self, bound.arguments)
        return result


_KINDS: Mapping[str, tuple[HookKind, ...]] = {
    "optional": ("slot", "chain"),
    "required": ("slot",),
    "default": ("slot", "chain"),
    "used_later": ("questions",),
    "gives": ("slot",),
    "takes": ("slot",),
    "checked": ("slot",),
    "suits": ("slot",),
    "keeps": ("slot",),
}
"""Option → the kinds of hooks that it is for."""


def _written(parameter: inspect.Parameter) -> str:
    """`*more`, or `'text' after a *`: an argument that isn't plain, as its author sees it."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return str(parameter.replace(annotation=parameter.empty))
    return f"{parameter.name!r} {'after a *' if parameter.kind is parameter.KEYWORD_ONLY else 'before a /'}"


class Options(TypedDict, total=False):
    """Properties of a spec besides its kind; see `HookSpec`."""

    optional: bool
    required: bool
    default: str
    asked: Stage | None
    observes: bool
    starts_only: bool
    used_later: bool
    gives: str
    takes: Mapping[str, tuple[str, ...]]
    checked: bool
    suits: str
    keeps: str
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
def hookspec(kind: HookKind, **options: Unpack[Options]) -> Any:
    """Declare a hook: a function without a body, whose arguments and annotation are what implementations get and give.

    Args:
        kind: how answers are used.
        options: the fields of `HookSpec`.

    Raises:
        PluginError: for an unknown option, or one that does not fit.
    """

    def declare(function: Callable[..., Any]) -> Any:
        if unknown := next((name for name in options if name not in Options.__annotations__), ""):
            there = f"there is no option {unknown!r}.{nearest(unknown, Options.__annotations__)}"
            raise PluginError(f"Hook {function.__name__!r} ({place(function)}): {there}")
        return HookSpec(function, kind, **options)

    return declare


def specs_of(module: ModuleType) -> dict[str, HookSpec[..., Any]]:
    """The hooks that a module declares, in the order of the file."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, HookSpec) and value.function.__module__ == module.__name__
    }

"""Calling plugins: whose function is called in what order, what is measured, and who is blamed."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import pluggy

from ..base.errors import ForgeError, PluginError, describe, locate
from ..base.format import place, shown
from ..base.names import HookOrigin, PluginRef
from .inspection import Inspection
from .plugin import MARK, PROJECT, Plugin
from .specs import HookSpec

log = logging.getLogger(PROJECT)


@dataclass(frozen=True)
class EnabledPlugin:
    """A plugin of this run."""

    ref: PluginRef
    cls: type[Plugin]
    default: bool = False
    """True if only `[defaults]` enabled it."""
    named: bool = False
    """True if the command line names it."""
    specs: Mapping[str, HookSpec[..., Any]] = field(compare=False, repr=False, kw_only=True)
    """The hooks that the run knows."""

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def neutral(self) -> bool:
        """True if it changes no number beyond rounding, so that a run can resume with or without it."""
        return self.cls.layout or all(one is not None and (one.observes or one.starts_only) for one in self._specs)

    @property
    def provides(self) -> frozenset[str]:
        """Every slot it fills or may fill."""
        return implemented(self.cls) | set(self.cls.provides)

    @property
    def observer(self) -> bool:
        """True if it only observes the run."""
        return all(one is not None and one.observes for one in self._specs)

    @property
    def _specs(self) -> list[HookSpec[..., Any] | None]:
        """The specs of the hooks that it implements; None for an unknown one."""
        return [self.specs.get(name) for name in implemented(self.cls)]


_IMPLEMENTED: WeakKeyDictionary[type[Plugin], frozenset[str]] = WeakKeyDictionary()


def implemented(plugin: type[Plugin]) -> frozenset[str]:
    """Names of the hooks (valid or not) that a class implements."""
    if plugin not in _IMPLEMENTED:
        marked = (name for name in dir(plugin) if hasattr(getattr(plugin, name, None), MARK))
        _IMPLEMENTED[plugin] = frozenset(marked)
    return _IMPLEMENTED[plugin]


class WrongReturnError(PluginError):
    """A hook returned something else than its spec declares."""


@dataclass(frozen=True)
class _Call:
    owner: EnabledPlugin
    function: Any
    required: tuple[str, ...]
    others: tuple[str, ...]
    """Arguments with defaults, given if the hook has them."""

    @classmethod
    def of(cls, owner: EnabledPlugin, function: Any) -> _Call:
        parameters = inspect.signature(function).parameters.values()
        required = tuple(one.name for one in parameters if one.default is one.empty)
        return cls(owner, function, required, tuple(one.name for one in parameters if one.name not in required))

    def whose(self, hook: str) -> str:
        return f"Plugin {self.owner.ref.label}, hook {hook} ({place(self.function)})"


class _Manager(pluggy.PluginManager):
    """Registers what implements the declared hooks; pluggy (1.7) would take long to look at all other attributes.

    It gets no specs: whoever enables plugins compares arguments; pluggy would refuse those with a default in the spec.
    """

    def __init__(self, specs: Mapping[str, HookSpec[..., Any]]) -> None:
        super().__init__(PROJECT)
        self._specs = specs

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return super().parse_hookimpl_opts(plugin, name) if name in self._specs else None

    def implementations(self, hook: str) -> list[pluggy.HookImpl]:
        """Return them in the order of plugin names."""
        caller: pluggy.HookCaller | None = getattr(self.hook, hook, None)
        return sorted(caller.get_hookimpls(), key=lambda one: one.plugin_name) if caller else []


def _watches(plugin: EnabledPlugin) -> int:
    return plugin.observer + plugin.cls.after_observers


@dataclass
class Implementations:
    """The implementations of every hook, in the order of plugin names, called one by one.

    pluggy registers them. It is not asked to call them: its order is that of registration, its errors name nobody.
    """

    _calls: Mapping[str, list[_Call]]
    _specs: Mapping[str, HookSpec[..., Any]]
    inspection: Inspection = field(default_factory=Inspection)
    _trace: bool = field(default_factory=lambda: os.environ.get("FORGE_TRACE_HOOKS") == "1")

    @classmethod
    def of(
        cls, plugins: Iterable[tuple[EnabledPlugin, Plugin]], specs: Mapping[str, HookSpec[..., Any]]
    ) -> Implementations:
        """Register plugins whose hooks were found to fit.

        Raises:
            PluginError: for an attribute of a plugin's object that hides a hook of its class.
        """
        manager, owners = _Manager(specs), dict[str, EnabledPlugin]()
        for enabled, plugin in plugins:
            if hidden := sorted(implemented(enabled.cls) & specs.keys() & vars(plugin).keys()):
                raise PluginError(
                    f"Plugin {enabled.ref.label}: __init__ sets the attribute {hidden[0]!r}, which hides the hook "
                    f"{hidden[0]} ({place(getattr(enabled.cls, hidden[0]))}). Rename the attribute."
                )
            owners[enabled.name] = enabled
            manager.register(plugin, enabled.name)
        calls = {
            hook: [_Call.of(owners[one.plugin_name], one.function) for one in manager.implementations(hook)]
            for hook in specs
        }
        for hook, spec in specs.items():
            if spec.kind == "event":  # observers are told last, trackers after the others: they see what these added
                calls[hook].sort(key=lambda call: _watches(call.owner))
        return cls(calls, specs)

    def owners(self, hook: str) -> list[EnabledPlugin]:
        return [call.owner for call in self._calls.get(hook, ())]

    def whose(self, hook: str, name: str) -> HookOrigin:
        """The plugin, the hook and the place of its implementation, for messages."""
        text = next((call.whose(hook) for call in self._calls[hook] if call.owner.name == name), f"Hook {hook}")
        return HookOrigin(text, name, hook)

    def arguments(self, name: str, hook: str) -> frozenset[str]:
        """Names of the arguments that a plugin's implementation of a hook asks for."""
        calls = [call for call in self._calls[hook] if call.owner.name == name]
        return frozenset(argument for call in calls for argument in (*call.required, *call.others))

    def collect(self, hook: str, arguments: Mapping[str, Any], only: str | None = None) -> list[tuple[str, Any]]:
        """Call a hook's implementations (or one plugin's); what each returned, by plugin name."""
        return [(call.owner.name, self._invoke(hook, call, arguments)) for call in self._of(hook, only)]

    def _of(self, hook: str, only: str | None) -> list[_Call]:
        return [call for call in self._calls.get(hook, ()) if only is None or call.owner.name == only]

    def tell(self, hook: str, argument: str, event: Any, only: str | None = None) -> None:
        """Call an event's implementations with its one argument; see `announce` for what a failure means."""
        self.announce(hook, {argument: event}, event if hasattr(event, "owner") else None, only)

    def announce(self, hook: str, arguments: Mapping[str, Any], owned: Any = None, only: str | None = None) -> None:
        """Call an event's implementations (or one plugin's). An observer's failure is a warning, and its last call."""
        for call in self._of(hook, only):
            if owned is not None:
                owned.owner = call.owner.name
            if not call.owner.observer:
                self._invoke(hook, call, arguments)
                continue
            try:
                self._invoke(hook, call, arguments)
            except Exception as error:  # a failing logger never costs a step of training
                if isinstance(error, ForgeError) and not isinstance(error, WrongReturnError):
                    raise
                label, what = call.owner.ref.label, f"{describe(error)}{_line(error, call.owner)}"
                log.warning("Plugin %s failed in %s and is left out from here on: %s", label, hook, what)
                log.warning("How plugin %s failed in %s:", label, hook, exc_info=error, extra={"screen": False})
                self.mute(call.owner)

    def mute(self, owner: EnabledPlugin) -> None:
        """Call nothing of this plugin any more."""
        for calls in self._calls.values():
            calls[:] = [call for call in calls if call.owner is not owner]

    def vacate(self, hook: str) -> None:
        """Call nobody for this hook any more."""
        self._calls[hook].clear()

    def blamed(self, hook: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that a plugin's hook gave, whose failures name both as those of the hook do."""
        call = next(call for call in self._calls[hook] if call.owner.name == name)

        @functools.wraps(function)
        def called(*arguments: Any, **more: Any) -> Any:
            with _blaming(hook, call):
                return function(*arguments, **more)

        return called

    def _invoke(self, hook: str, call: _Call, arguments: Mapping[str, Any]) -> Any:
        start = time.perf_counter()
        try:
            with _blaming(hook, call):
                answer = call.function(
                    *[arguments[name] for name in call.required],
                    **{name: arguments[name] for name in call.others if name in arguments},
                )
                if isinstance(answer, Iterator) and self._specs[hook].kind in ("phases", "questions"):
                    answer = list(answer)
        finally:
            if self._trace:
                seconds = time.perf_counter() - start
                log.warning("hook %s → %s (%.3f ms)", hook, call.owner.name, 1e3 * seconds)
        kind = self.inspection.of_hook(self._specs[hook])
        if text := kind.problem(answer):
            wrong = WrongReturnError(f"{call.whose(hook)}: expected {kind.words}, {text}.")
            locate(wrong, plugin=call.owner.name, hook=hook)
            raise wrong
        return answer


@contextmanager
def _blaming(hook: str, call: _Call) -> Iterator[None]:
    """Names the plugin and the hook on whatever its code raises."""
    try:
        yield
    except SystemExit as error:
        wrong = PluginError(f"{call.whose(hook)}: exits ({error}). To end the run, use job.control.stop.")
        locate(wrong, plugin=call.owner.name, hook=hook)
        raise wrong from error
    except PluginError as error:
        locate(error, plugin=call.owner.name, hook=hook)
        if str(error).startswith("Plugin "):
            raise
        wrong = PluginError(f"{call.whose(hook)}: {error}")
        locate(wrong, plugin=call.owner.name, hook=hook)
        raise wrong from error
    except Exception as error:
        locate(error, plugin=call.owner.name, hook=hook)
        if not isinstance(error, ForgeError):
            error.add_note(plugin_note(call.owner.ref, hook))
        raise


def without(plugins: Iterable[EnabledPlugin]) -> str:
    """Suggest how to disable one of several plugins, if possible one that the user has not just named."""
    names = {one.name: one.named for one in plugins}
    if others := sorted(name for name, named in names.items() if not named):
        return " or ".join(f"use --without {name}" for name in others)
    return f"leave {' or '.join(sorted(names))} out of --plugins" if names else "disable one with --without"


def plugin_note(found: PluginRef, hook: str) -> str:
    """The note that names a plugin in a traceback."""
    return f"in plugin {found.label}, hook {hook}"


def _line(error: BaseException, owner: EnabledPlugin) -> str:
    """The innermost line of a plugin's own code that an error passed through."""
    if isinstance(error, ForgeError):  # whose message says all there is to say
        return ""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [at for at in frames if at_home(str(at[0].f_globals.get("__name__", "")), [owner])]
    return "".join(f" ({shown(frame.f_code.co_filename, line)})" for frame, line in own[-1:])


def at_home(module: str, enabled: Iterable[EnabledPlugin]) -> list[EnabledPlugin]:
    """The plugins that a module belongs to: it is theirs, or lies in the private module or package beside theirs."""
    homes: dict[str, list[EnabledPlugin]] = {}
    for plugin in enabled:
        for own in {plugin.ref.module, plugin.cls.__module__}:
            package, dot, name = own.rpartition(".")
            for home in (own, f"{package}{dot}_{name}"):
                homes.setdefault(home, []).append(plugin)
    above = (module, *(module[:at] for at, letter in enumerate(module) if letter == "."))
    return next((homes[home] for home in above if home in homes), [])

"""Calls plugins by the specs of hooks, and uses their answers as each hook's kind says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..base.errors import ConfigError
from ..base.names import HookOrigin, PluginRef, import_module
from .calls import EnabledPlugin, Implementations, at_home, without
from .guards import Guarded, nesting
from .inspection import Inspection
from .plugin import Plugin
from .specs import HookSpec, Stage

if TYPE_CHECKING:
    from ..config import Config

Specs = Mapping[str, HookSpec[..., Any]]
_T = TypeVar("_T")


class Dispatch:
    """The enabled plugins of a run, and the specs by which they are called."""

    def __init__(
        self,
        plugins: Sequence[tuple[EnabledPlugin, Plugin]],
        defaults: Mapping[str, str],
        specs: Specs,
        inspection: Inspection | None = None,
    ) -> None:
        self.specs, self.inspection = specs, inspection or Inspection()
        self.plugins = {enabled.name: plugin for enabled, plugin in plugins}
        self.enabled = {enabled.name: enabled for enabled, _ in plugins}
        self.defaults = dict(defaults)
        self.opened = False  # whether the model is only opened, as to generate text: nothing reads rows of the data
        self.fingerprint: Callable[[PluginRef], str] = lambda ref: ""  # of a plugin's code, as plugins.json has it
        self.covering: Callable[[str], list[str]] = lambda axis: []  # installed plugins that would cover an axis
        self.compose_extra: Callable[[Any, Any], Sequence[Any]] = lambda job, composition: ()  # models beside a job's
        self.selection = selection  # of plugins, as config.toml has it
        self.at_stage: Callable[[Any, Any, Stage], None] = lambda hooks, config, stage: None  # looks for idle plugins
        self.note_plugin: Callable[[BaseException, Iterable[EnabledPlugin], Specs], None] = lambda *_: None
        self.unused: set[str] = set()  # plugins that turned out to have nothing to do
        self.used: set[tuple[str, str]] = set()  # slot or chain, and a plugin whose answer was taken
        self.called: set[str] = set()
        self.spans: dict[str, list[tuple[str, Any]]] = {}  # a span, and what plugins answered about it
        self.inside: list[str] = []  # spans that the run is in, outermost first, where there is an `around`
        self._calls = Implementations.of(plugins, specs)
        self._calls.inspection = self.inspection

    def provider(self, slot: str) -> str | None:
        """The name of the plugin that fills a slot, or None where nobody does.

        Raises:
            ConfigError: if two do, naming both.
        """
        owners = self._calls.owners(slot)
        if len(owners) > 1:
            names = " and ".join(owner.ref.label for owner in owners)
            raise ConfigError(f"Plugins {names} both fill the slot {slot!r}; {without(owners)}.")
        return owners[0].name if owners else None

    def whose(self, hook: str, name: str = "") -> HookOrigin:
        """A plugin, its hook and where it stands, for messages; the slot's provider where no plugin is named."""
        return self._calls.whose(hook, name or self.provider(hook) or "")

    @property
    def keepers(self) -> dict[str, Any]:
        """Slot → the module that keeps what its provider reads; see `HookSpec.keeps`."""
        return {slot: import_module(spec.keeps) for slot, spec in self.specs.items() if spec.keeps}

    def implementers(self, hook: str) -> list[str]:
        """Names of the plugins that implement a hook."""
        return [owner.name for owner in self._calls.owners(hook)]

    def arguments(self, name: str, hook: str) -> frozenset[str]:
        """Names of the arguments that a plugin's implementation of a hook asks for."""
        return self._calls.arguments(name, hook)

    def acting(self, hook: str) -> list[str]:
        """The same without those that turned out to have nothing to do."""
        return [name for name in self.implementers(hook) if name not in self.unused]

    def mute(self, name: str, *, acting: bool = False) -> None:
        """Leave a plugin out of this process: it stays enabled, but is told nothing.

        Args:
            name: of the plugin; one that is not enabled is ignored.
            acting: allows a plugin that does more than observe the run.

        Raises:
            ConfigError: if the plugin does more than observe, and that is not allowed.
        """
        if enabled := self.enabled.get(name):
            if not enabled.observer and not acting:
                raise ConfigError(f"Plugin {enabled.ref.label} does more than watch the run; it can't be left out.")
            self._calls.mute(enabled)

    def owner(self, thing: object) -> str:
        """`plugin 'mine' (my-package 1.0)` for what an enabled plugin's code made; empty for anything else."""
        labels = dict.fromkeys(one.ref.label for one in at_home(type(thing).__module__, self.enabled.values()))
        return f"plugin {' or '.join(labels)}" if labels else ""

    def vacate(self, slot: str) -> None:
        """Have nobody fill an optional slot in this process."""
        self._calls.vacate(slot)

    def check_slots(self, required: Collection[str]) -> None:
        """Check that each slot has at most one provider, and a required one has one; and that providers fit together.

        Raises:
            ConfigError: naming the slot and its plugins.
        """
        for slot, spec in self.specs.items():
            if spec.kind == "slot" and not self.provider(slot) and slot in required:
                raise ConfigError(_unfilled(spec))
        self._check_fit()

    def _check_fit(self) -> None:
        self.inspection.check_fit([*self.enabled.values()], {slot for slot, _ in self.used}, self.specs)

    def gives(self, slot: str) -> str:
        """Return what a slot's provider gives to others, such as `token_logits` for a head; empty if unfilled."""
        return next((gives(one, slot, self.specs) for one in self.enabled.values() if slot in one.provides), "")

    def call(self, spec: HookSpec[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call the plugins that implement a hook, and use their answers as its kind says; see `HookSpec`.

        Raises:
            ConfigError: for a slot, or a thing that a chain is asked about, with no provider or several.
            PluginError: for an answer that is not what the spec declares.
        """
        if (known := self.specs.get(spec.name, spec)) is not spec:
            raise ConfigError(f"Two hooks are named {spec.name!r}{spec.declared}{known.declared}; uninstall one.")
        self.called.add(spec.name)
        if spec.kind == "slot":
            return self._slot(spec, arguments)
        if spec.kind == "chain":
            return self._chain(spec, arguments)
        if spec.kind == "event":
            return self._calls.announce(spec.name, arguments)
        answers = [one for one in self._calls.collect(spec.name, arguments) if one[1] is not None]
        if spec.kind == "questions":
            return answers
        if spec.kind == "spans":
            what = next((one for one in arguments.values() if isinstance(one, str)), spec.name)
            self.spans[what] = answers
            return nesting(
                what,
                [(self.whose(spec.name, name), span) for name, span in answers],
                self.inside,
                self.inspection.context,
            )
        each = [(name, one) for name, answer in answers for one in ([answer] if hasattr(answer, "phase") else answer)]
        return sorted(each, key=lambda one: (one[1].phase, one[0]))

    def _slot(self, spec: HookSpec[..., Any], arguments: Mapping[str, Any]) -> Any:
        name = self.provider(spec.name)
        if name is None:
            raise ConfigError(_unfilled(spec))
        ((_, answer),) = self._calls.collect(spec.name, arguments)
        self.used.add((spec.name, name))
        if spec.takes:
            self._check_fit()
        kinds = self.inspection.of_methods(spec)
        return Guarded(answer, kinds, self.whose(spec.name)) if kinds else answer

    def _chain(self, spec: HookSpec[..., Any], arguments: Mapping[str, Any]) -> Any:
        chain, (thing, value) = spec.name, next((one for one in arguments.items() if one[0] != "job"), ("job", ""))
        default = [name for name in self.implementers(chain) if name == self.defaults.get(chain)]
        others = [name for name in self.implementers(chain) if name not in default]
        index = getattr(value, "index", None)
        which = f"{thing} {value if index is None or callable(index) else index}"
        answers = self._given(chain, arguments, others) or self._given(chain, arguments, default)
        if claimed := self.one(answers, lambda names: f"Plugins {names} both build {chain} for {which}"):
            self.used.add((chain, claimed[0]))
            return claimed[1]
        if spec.optional:
            return None
        raise ConfigError(f"No enabled plugin builds {chain} for {which}{spec.declared}; see `forge plugins list`.")

    def _given(self, hook: str, arguments: Mapping[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """Return the answers of the named plugins, except None."""
        return [one for name in names for one in self._calls.collect(hook, arguments, only=name) if one[1] is not None]

    def one(self, answers: Sequence[tuple[str, _T]], refusal: Callable[[str], str]) -> tuple[str, _T] | None:
        """Return the only answer with its plugin's name; `refusal` says of the names of several what is wrong."""
        if len(answers) > 1:
            names = " and ".join(repr(name) for name, _ in answers)
            raise ConfigError(f"{refusal(names)}; {without(self.enabled[name] for name, _ in answers)}.")
        return answers[0] if answers else None

    def only(self, spec: HookSpec[..., list[tuple[str, _T]]], arguments: Mapping[str, Any]) -> _T | None:
        """The one answer to a question, or None if no plugin answers.

        Raises:
            ConfigError: if several plugins answer.
        """
        given = self.one(self.call(spec, arguments), lambda names: f"Plugins {names} both answer {spec.name}")
        return cast("_T", given[1]) if given else None


def gives(plugin: EnabledPlugin, slot: str, specs: Specs) -> str:
    """Return what a slot's provider gives to others; empty if the slot defines nothing."""
    return plugin.cls.gives.get(slot, specs[slot].gives if slot in specs else "")


def selection(config: Config, hooks: Dispatch) -> dict[str, Any]:
    """Keys of a configuration, apart from its sections, that enable the same plugins again."""
    return {"plugins": [*config.plugins], "without": [*config.without], "defaults": {**config.defaults}}


def _unfilled(spec: HookSpec[..., Any]) -> str:
    return f"No enabled plugin fills the slot {spec.name!r}{spec.declared}; see `forge plugins list`."

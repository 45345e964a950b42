"""Selection of the plugins that a request enables, with reasons."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ..base.errors import ConfigError, nearest
from ..base.names import PluginRef, canonical, is_file
from ..config.tree import CONDITIONAL, Origin, Tree
from ..plugin.calls import EnabledPlugin
from .declared import Specs
from .discovery import RESERVED, discover, dotted, in_file, instead, is_name, load, plugin_name


@dataclass
class Resolution:
    """Enabled plugins, and why they are enabled."""

    tree: Tree
    plugins: Sequence[str] = ()
    """Plugins that the command line names, which is stronger than a file."""
    without: Sequence[str] = ()
    """Plugins that it disables."""
    brought: Sequence[tuple[str, Origin]] = ()
    """Plugins that come with values in the tree, each with its origin."""
    inspect: Callable[[EnabledPlugin], Iterable[str]] = lambda plugin: ()
    """Gives further mistakes in a plugin's class."""
    training: bool = True
    world: int = 1
    mistakes: list[str] = field(default_factory=list)
    specs: Specs = field(init=False)
    """The hooks that the run knows."""
    hints: list[str] = field(default_factory=list)
    """Hints to show with mistakes, which they may explain."""
    known: dict[str, list[PluginRef]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Plugins that were asked for, as they were written."""
    removed: set[str] = field(default_factory=set)
    defaults: dict[str, str] = field(default_factory=dict)
    """Slot → default in use."""
    displaced: dict[str, str] = field(default_factory=dict)
    """Default → the plugin that takes its place."""
    sometimes: set[str] = field(default_factory=set)
    """Defaults for another number of processes, or another precision. One file serves for all of them."""
    idle: dict[str, str] = field(default_factory=dict)
    """Plugin that was asked for and has nothing to do → the slot that nobody requires. No mistake: it may be tried
    alone."""

    def __post_init__(self) -> None:
        self.specs = Specs(self.mistakes)

    def enable(self) -> list[EnabledPlugin]:
        for found in discover():
            self.known.setdefault(found.name, []).append(found)
        asked = [*self._listed("plugins"), *((n, Origin("--set", "--plugins")) for n in self.plugins), *self.brought]
        again = {plugin_name(spec) for spec in self.plugins}
        unwanted = [(name, str(o)) for name, o in self._listed("without") if canonical(name) not in again] + [
            (n, "--without") for n in self.without
        ]
        self.mistakes += [
            f"--without {name}: --plugins asks for it too; leave one of the two out."
            for name in self.without
            if canonical(name) in again
        ]
        wanted, on_demand = self._wanted_defaults()
        removed = {canonical(name) for name, _ in unwanted}
        founds: dict[str, PluginRef] = {}
        for spec, where in asked:
            asked_for = self._find(spec, where) if plugin_name(spec) not in removed else None
            if asked_for is not None:
                if not is_name(spec) and (known := self.known.get(asked_for.name, [asked_for])[0]) != asked_for:
                    self.hints.append(
                        f"{where}: {spec} is named after its class, so it takes the place of the installed plugin "
                        f"{known.label}. Rename the class to have both."
                    )
                if founds.setdefault(asked_for.name, asked_for) != asked_for:
                    other = founds[asked_for.name].object
                    self.mistakes.append(f"{where}: {asked_for.object} and {other} are both {asked_for.name!r}.")
                self.asked.append(asked_for.name if is_name(spec) else asked_for.object)
        self.asked = list(dict.fromkeys(self.asked))
        explicit = self._load(founds.values(), default=False)
        effective = {plugin_name(spec) for spec, _ in asked} | set(wanted.values())
        named = {canonical(v.value) for v in self.tree.below(("defaults",)).values() if isinstance(v.value, str)}
        named |= {canonical(spec.default) for spec in self.specs.values() if spec.default}
        self.sometimes = named - set(wanted.values()) - (set() if removed else set(on_demand.values()))
        for name, said in unwanted:
            if canonical(name) not in effective | self.sometimes and self.training:
                hint = nearest(canonical(name), effective)
                self.mistakes.append(f"{said}: {name!r} would not be enabled anyway.{hint}")
        self.removed = removed & (effective | self.sometimes)
        enabled = [*explicit, *self._defaults(wanted, explicit)]
        demanded: dict[str, str] = {}
        while more := self._demanded(enabled, on_demand).items() - demanded.items():
            demanded |= more
            enabled += self._defaults(dict(sorted(more)), enabled)
        self.sometimes -= set(self.defaults.values())
        self.idle = _idle(explicit, on_demand.keys() - demanded.keys())
        enabled.sort(key=lambda plugin: plugin.name)
        for plugin in enabled:
            self.mistakes += self.inspect(plugin)
        self._check_defaults(enabled)
        if not self.mistakes:  # what is missing for them would only be told twice
            self._check_relations(enabled)
        return enabled

    def _listed(self, key: str) -> list[tuple[str, Origin]]:
        value = self.tree.values.get((key,))
        if value is None:
            return []
        if not isinstance(value.value, list) or not all(isinstance(item, str) for item in value.value):
            self.mistakes.append(f"{value.origin}: {key}: expected a list of names, found {value.value!r}.")
            return []
        return [(item, value.origin) for item in value.value]

    def _find(self, spec: str, where: Origin) -> PluginRef | None:
        if not is_name(spec):
            return self._uninstalled(spec, where)
        name = canonical(spec)
        candidates = self.known.get(name, [])
        if not candidates:
            self.mistakes.append(f"{where}: there is no plugin named {spec!r}.{instead(spec, self.known)}")
        elif len(candidates) > 1:
            owners = " and ".join(f"{found.distribution} {found.version}" for found in candidates)
            self.mistakes.append(f"{where}: the name {name!r} is used by {owners}; uninstall one.")
        elif name in RESERVED:
            self.mistakes.append(f"{where}: {candidates[0].distribution} names a plugin {name!r}, which is reserved.")
        else:
            return candidates[0]
        return None

    def _uninstalled(self, spec: str, where: Origin) -> PluginRef | None:
        if not is_file(spec) and not re.fullmatch(r"\w+(\.\w+)*:\w+", spec):
            self.mistakes.append(f"{where}: {spec!r}: expected a plugin's name, or package.module:Class.")
        elif plugin_name(spec) in RESERVED:
            self.mistakes.append(f"{where}: {spec!r} would be named {plugin_name(spec)!r}, which is reserved.")
        else:
            try:
                return in_file(spec, where.folder) if is_file(spec) else dotted(spec)
            except ConfigError as error:
                self.mistakes.append(f"{where}: {error}")
        return None

    def _wanted_defaults(self) -> tuple[dict[str, str], dict[str, str]]:
        """Slot → default, and the same where it counts only if an enabled plugin requires the slot."""
        wanted: dict[str, str] = {}
        on_demand: dict[str, str] = {}
        precision = self.tree.values.get(("train", "precision"))
        narrow = precision.value if precision else "fp32"
        source = self.tree.values.get(("train", "init_from"))
        met = (self.world > 1, narrow != "fp32", narrow == "fp16", bool(source and source.value), True)
        conditions = dict(zip(CONDITIONAL, met, strict=True))
        for key, value in self.tree.below(("defaults",)).items():
            *several, slot = key
            if len(several) == 1 and several[0] in conditions and isinstance(value.value, str):
                if value.value and conditions[several[0]]:
                    (on_demand if several[0] == "required" else wanted)[slot] = canonical(value.value)
            elif several or not (spec := self.specs.find(slot)) or spec.kind not in ("slot", "chain"):
                slots = [name for name, spec in self.specs.items() if spec.kind in ("slot", "chain")]
                name = ".".join(key)
                self.mistakes.append(f"{value.origin}: defaults.{name}: there is no such slot.{nearest(name, slots)}")
            elif not isinstance(value.value, str):
                self.mistakes.append(
                    f"{value.origin}: defaults.{slot}: expected a plugin's name, found {value.value!r}."
                )
            elif value.value:
                wanted[slot] = canonical(value.value)
        return wanted, on_demand

    def _demanded(self, enabled: Iterable[EnabledPlugin], on_demand: Mapping[str, str]) -> dict[str, str]:
        """Slot → default, of the slots that must be filled: those of `[defaults.required]`, and those whose spec names
        a default while the configuration's `[defaults]` names none."""
        slots = self.specs.required.union(*(plugin.cls.requires for plugin in enabled))
        said = {key[-1] for key in self.tree.below(("defaults",))}
        given = {slot: spec.default for slot in slots - said if (spec := self.specs.find(slot)) and spec.default}
        return {slot: canonical(name) for slot, name in {**given, **on_demand}.items() if slot in slots}

    def _load(self, founds: Iterable[PluginRef], *, default: bool) -> list[EnabledPlugin]:
        loaded = []
        for found in founds:
            named = found.name in map(plugin_name, self.plugins)
            try:
                enabled = EnabledPlugin(found, load(found), default, named, specs=self.specs)
            except ConfigError as error:
                way_out = "" if named or not self.training else f" Leave it out with `--without {found.name}`."
                self.mistakes.append(f"{error}{way_out}")
                continue
            self.specs.admit(enabled)
            for module, command in sorted(enabled.cls.needs.items()):
                if importlib.util.find_spec(module.partition(".")[0]) is None:
                    self.mistakes.append(f"Plugin {found.label} needs {module!r}. Install it: {command}")
            loaded.append(enabled)
        return loaded

    def _defaults(self, wanted: Mapping[str, str], explicit: list[EnabledPlugin]) -> list[EnabledPlugin]:
        """Defaults of slots that nobody else fills. One that is displaced in one slot steps aside from all."""
        slots = {slot for slot, spec in self.specs.items() if spec.kind != "slot"}
        filled = {slot: one.name for one in explicit for slot in one.provides if slot not in slots}
        names = {plugin.name for plugin in explicit}
        self.displaced |= {name: filled[slot] for slot, name in wanted.items() if slot in filled and name not in names}
        founds: dict[str, PluginRef] = {}
        for slot, name in wanted.items():
            if name in self.removed or name in self.displaced or (slot in filled and name not in names):
                continue
            if name not in names:
                found = self._find(name, Origin("preset", self._default_of(slot)))
                if found is None:
                    continue
                founds[name] = found
            self.defaults[slot] = name
        return self._load(founds.values(), default=True)

    def _check_defaults(self, enabled: list[EnabledPlugin]) -> None:
        provided = {plugin.name: plugin.provides for plugin in enabled}
        for slot, name in self.defaults.items():
            if slot not in provided.get(name, {slot}):
                found = self.tree.below(("defaults",))
                at = "".join(f"{value.origin}: " for key, value in found.items() if key[-1] == slot)
                text = f"plugin {name!r} does not fill the slot {slot!r}."
                self.mistakes.append(f"{at}{self._default_of(slot)}: {text}")

    def _default_of(self, slot: str) -> str:
        """`defaults.optimizer`, or the spec that names the slot's default, for messages."""
        said = any(key[-1] == slot for key in self.tree.below(("defaults",)))
        return f"defaults.{slot}" if said else f"default of the hook {slot!r}{self.specs[slot].declared}"

    def _check_relations(self, enabled: list[EnabledPlugin]) -> None:
        provided = {plugin.name: {plugin.name, *plugin.provides} for plugin in enabled}
        for plugin in enabled:
            others = {thing: name for name, things in provided.items() if name != plugin.name for thing in things}
            for needed in plugin.cls.requires:
                if canonical(needed) not in others:
                    default = next((v.value for k, v in self.tree.below(("defaults",)).items() if k[-1] == needed), "")
                    like = f", like {default!r}," if default else ""
                    what = f"enable a plugin that fills it{like}" if self.specs.find(needed) else "enable it"
                    self.mistakes.append(f"Plugin {plugin.ref.label} requires {needed!r}; {what} with --plugins.")
            for unwanted in plugin.cls.conflicts:
                if other := others.get(canonical(unwanted)):
                    self.mistakes.append(f"Plugins {plugin.name!r} and {other!r} can't be enabled together.")


def _idle(explicit: Iterable[EnabledPlugin], unneeded: AbstractSet[str]) -> dict[str, str]:
    """Plugins that fill nothing but slots that no enabled plugin asks for, each with one of them."""
    does = {plugin.name: plugin.provides - {"check_config"} for plugin in explicit}
    return {name: min(slots) for name, slots in does.items() if slots and slots <= unneeded}

"""Plugins that are enabled, and that nobody asked or whose answers nobody took: their options have no effect."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from forge_train.base.errors import ConfigError
from forge_train.config.tree import Origin
from forge_train.plugin.calls import EnabledPlugin, implemented
from forge_train.plugin.hookspecs import SPECS
from forge_train.plugin.job import Hooks
from forge_train.plugin.plugin import PROJECT
from forge_train.plugin.specs import Stage

if TYPE_CHECKING:
    from forge_train.config import Config

log = logging.getLogger(PROJECT)


def note_idle(hooks: Hooks, config: Config, stage: Stage) -> None:
    """Report plugins that had nothing to do by a stage; at the end of a run, hooks that nothing has called.

    Raises:
        ConfigError: as `note_unused` does.
    """
    if stage == "run":
        note_uncalled(hooks, stage)
    else:
        note_unused(hooks, config, stage)


def note_unused(hooks: Hooks, config: Config, stage: Stage) -> None:
    """Take plugins that had nothing to do by a stage, and can't have anything later, out of `Hooks.acting`.

    Raises:
        ConfigError: for one that was asked for to build layers, and for options of a default that it never used.
    """
    specs = hooks.specs
    stages = get_args(Stage)
    past = stages[: stages.index(stage) + 1]
    due = {name for name, spec in specs.items() if spec.asked in past}
    mistakes: list[str] = []
    for one in hooks.enabled.values():
        does = {hook for hook in implemented(one.cls) & specs.keys() if specs[hook].kind != "questions"}
        if one.name in hooks.unused or not does or not does <= due or any(name == one.name for _, name in hooks.used):
            continue
        hooks.unused.add(one.name)
        reasons = "; ".join(_reason(hooks, hook) for hook in sorted(does))
        if one.default:
            mistakes += [f"{where}: has no effect: {reasons}. Remove it." for where in _options(one, config)]
        elif any(specs[hook].kind == "chain" for hook in does):
            mistakes.append(f"Plugin {one.ref.label} has nothing to do: {reasons}. Leave it out.")
        else:
            log.warning("Plugin %r has nothing to do: %s.", one.name, reasons)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    note_uncalled(hooks, stage)


def note_uncalled(hooks: Hooks, stage: Stage) -> None:
    """Warn of hooks that plugins implement and that nothing has called by a stage. The kernel calls its own."""
    for name, spec in hooks.specs.items():
        if spec.asked == stage and name not in hooks.called and name not in SPECS:
            for plugin in hooks.acting(name):
                if hooks.enabled[plugin].default:  # nobody asked for it
                    continue
                log.warning(
                    "%s: nothing in this run calls this hook%s. Enable a plugin that does; `forge plugins hooks` lists "
                    "them.",
                    hooks.whose(name, plugin),
                    spec.declared,
                )


def _reason(hooks: Hooks, hook: str) -> str:
    if builders := sorted(name for used, name in hooks.used if used == hook):
        return f"{hook} of every layer is built by {' and '.join(map(repr, builders))}"
    return f"nothing in this run asks for {hook}"


def _options(one: EnabledPlugin, config: Config) -> Iterator[str]:
    """`where: section.key` of what the user set. A complete file, which forge wrote, sets everything to what it was."""
    section = config.sections[one.name]
    fields = {field.name: field for field in dataclasses.fields(section)}
    for key, origin in config.origins.items():
        if key[0] != one.name or len(key) == 1 or origin.kind == "preset":
            continue
        if origin.kind == "file" and (_unchanged(section, fields[key[1]]) or _written_by_forge(origin)):
            continue
        yield f"{origin}: {'.'.join(key)}"


def _unchanged(section: object, field: dataclasses.Field[object]) -> bool:
    made = field.default_factory
    default = field.default if made is dataclasses.MISSING else made()
    return bool(getattr(section, field.name) == default)


def _written_by_forge(origin: Origin) -> bool:
    """Return True if a file describes a run or a checkpoint."""
    return (Path(origin.where.rpartition(":")[0]).parent / "plugins.json").is_file()

"""Checks that the providers of several slots fit together: task and loss fit the head, the loss fits the task."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from forge_train.base.errors import ConfigError
from forge_train.plugin.calls import EnabledPlugin
from forge_train.plugin.dispatch import Specs, gives


def takes(plugin: EnabledPlugin, slots: Collection[str], specs: Specs) -> dict[str, tuple[str, ...]]:
    """Slot → what a plugin, as the provider of some slots, can take from that slot's provider."""
    implied = {slot: kinds for own in slots if own in specs for slot, kinds in specs[own].takes.items()}
    return {**implied, **plugin.cls.takes}


def check_fit(plugins: Sequence[EnabledPlugin], asked: Collection[str], specs: Specs) -> None:
    """Check that task, head, loss and any other provider and consumer fit together; for arguments see `misfits`.

    Raises:
        ConfigError: names those that do not fit.
    """
    if lines := list(misfits(plugins, asked, specs)):
        raise ConfigError("\n".join(lines))


def misfits(plugins: Sequence[EnabledPlugin], asked: Collection[str], specs: Specs) -> Iterator[str]:
    """A sentence for each plugin that is given what it can't take.

    Args:
        plugins: the enabled ones.
        asked: slots that somebody has asked for. A default in an optional slot may never be asked for.
        specs: the hooks that the run knows.
    """
    required = {slot for plugin in plugins for slot in plugin.cls.requires} | set(asked)
    for plugin in plugins:
        optional = {slot for slot in plugin.provides if slot in specs and specs[slot].optional}
        slots = plugin.provides - (optional - required if plugin.default else set())
        if plugin.default and not slots:
            continue
        for slot, kinds in takes(plugin, slots, specs).items():
            for giver in plugins:
                given = gives(giver, slot, specs)
                if slot in giver.provides and giver is not plugin and kinds and given not in kinds:
                    wanted = " or ".join(map(repr, kinds))
                    yield (
                        f"Plugin {plugin.ref.label} takes {wanted} from the slot {slot!r}, but plugin "
                        f"{giver.ref.label} gives {given!r}. Enable another plugin for one of them."
                    )

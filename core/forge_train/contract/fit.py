"""Check that the providers of several slots fit together: task and loss fit the head, the loss fits the task."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..ground.errors import ConfigError
from .calls import EnabledPlugin
from .hookspecs import GIVES, OPTIONAL, TAKES


def gives(plugin: EnabledPlugin, slot: str) -> str:
    """Return what a slot's provider gives to others; empty if the slot defines nothing."""
    return plugin.cls.gives.get(slot, GIVES.get(slot, ""))


def takes(plugin: EnabledPlugin, slots: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Slot → what a plugin, as the provider of some slots, can take from that slot's provider."""
    implied = {slot: kinds for own in slots for slot, kinds in TAKES.get(own, {}).items()}
    return {**implied, **plugin.cls.takes}


def check_fit(plugins: Sequence[EnabledPlugin], asked: Collection[str]) -> None:
    """Check that task, head, loss and any other provider and consumer fit together; for arguments see `misfits`.

    Raises:
        ConfigError: names those that do not fit.
    """
    if lines := list(misfits(plugins, asked)):
        raise ConfigError("\n".join(lines))


def misfits(plugins: Sequence[EnabledPlugin], asked: Collection[str]) -> Iterator[str]:
    """A sentence for each plugin that is given what it can't take.

    Args:
        plugins: the enabled ones.
        asked: slots that somebody has asked for. A default in an optional slot may never be asked for.
    """
    required = {slot for plugin in plugins for slot in plugin.cls.requires} | set(asked)
    for plugin in plugins:
        slots = {slot for slot in plugin.provides if not plugin.default or slot not in OPTIONAL or slot in required}
        if plugin.default and not slots:
            continue
        for slot, kinds in takes(plugin, slots).items():
            for giver in plugins:
                given = gives(giver, slot)
                if slot in giver.provides and giver is not plugin and kinds and given not in kinds:
                    wanted = " or ".join(map(repr, kinds))
                    yield (
                        f"Plugin {plugin.ref.label} takes {wanted} from the slot {slot!r}, but plugin "
                        f"{giver.ref.label} gives {given!r}. Enable another plugin for one of them."
                    )

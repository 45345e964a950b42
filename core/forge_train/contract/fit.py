"""Whether the providers of several slots fit each other: task and loss the head, the loss the task."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..ground.errors import ConfigError
from .calls import EnabledPlugin
from .hookspecs import GIVES, OPTIONAL, TAKES


def gives(plugin: EnabledPlugin, slot: str) -> str:
    """What a slot's provider gives to others; empty where the slot has no such thing."""
    return plugin.cls.gives.get(slot, GIVES.get(slot, ""))


def takes(plugin: EnabledPlugin, slots: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Slot → what a plugin, as the provider of some slots, can take from that slot's provider."""
    implied = {slot: kinds for own in slots for slot, kinds in TAKES.get(own, {}).items()}
    return {**implied, **plugin.cls.takes}


def check_fit(plugins: Sequence[EnabledPlugin], asked: Collection[str]) -> None:
    """Whether task, head, loss and what else takes something from others fit each other; arguments as of `misfits`.

    Raises:
        ConfigError: naming those that do not.
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

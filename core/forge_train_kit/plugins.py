"""Plugins by their names."""

from __future__ import annotations

from forge_train.base.errors import ConfigError
from forge_train.base.names import PluginRef, canonical, is_file
from forge_train.registry.discovery import discover, dotted, in_file, instead


def find(name: str) -> PluginRef:
    """The plugin of a name, the dotted one, or the one in a file. It is not imported.

    Raises:
        ConfigError: if there is none, or more than one.
    """
    if is_file(name):
        return in_file(name)
    if ":" in name:
        return dotted(name)
    everything = discover()
    found = [one for one in everything if one.name == canonical(name)]
    if not found:
        raise ConfigError(f"There is no plugin named {name!r}.{instead(name, [o.name for o in everything])}")
    if len(found) > 1:
        owners = " and ".join(f"{one.distribution} {one.version}" for one in found)
        raise ConfigError(f"The name {name!r} is used by {owners}; uninstall one.")
    return found[0]

"""The plugins of a run, as its config.toml selects them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge_train.base.names import canonical
from forge_train.config import Config
from forge_train.config.tree import CONDITIONAL, Key
from forge_train.plugin.dispatch import Dispatch


def selection(config: Config, hooks: Dispatch) -> dict[str, Any]:
    """Keys of a configuration, apart from its sections, that enable the same plugins again, on other layouts too."""
    found: dict[str, Any] = {"plugins": list(config.plugins)}
    base = {key: value for key, value in config.base.items() if key[0] == "defaults"}
    enabled = {canonical(name) for name in (*config.base.get(("plugins",), ()), *base.values())}
    if without := [name for name in config.without if name in enabled]:  # the others would not be enabled anyway
        found["without"] = without
    emptied = {slot: "" for _, slot, *_ in base if slot in hooks.specs and not hooks.implementers(slot)}
    if defaults := dict(_in_tables({**emptied, **config.defaults}, base, hooks)):
        found["defaults"] = defaults
    return found


def _in_tables(slots: Mapping[str, str], base: Mapping[Key, Any], hooks: Dispatch) -> Iterator[tuple[str, Any]]:
    """Defaults as they stand in a file: those with a condition in its table."""
    conditions = {key[2]: key[1] for key in base if key[1] in CONDITIONAL}
    tables: dict[str, dict[str, str]] = {}
    for slot, name in sorted(slots.items()):
        if condition := conditions.get(slot, "" if slot in hooks.specs else "distributed"):
            tables.setdefault(condition, {})[slot] = name
        else:
            yield slot, name
    yield from tables.items()

"""Writing resolved configurations as TOML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..base.names import canonical
from ..config.tree import CONDITIONAL, Key
from ..config.validate import plain

if TYPE_CHECKING:
    from ..config import Config
    from ..plugin.job import Hooks


def to_toml(config: Config, hooks: Hooks) -> str:
    """Write the resolved configuration: `forge train` on it repeats the run. `run.name` is left out, and values that
    Forge filled in stand as they were written."""
    import tomlkit

    document = tomlkit.document()
    document["plugins"] = list(config.plugins)
    base = {key: value for key, value in config.base.items() if key[0] == "defaults"}
    enabled = {canonical(name) for name in (*config.base.get(("plugins",), ()), *base.values())}
    if without := [name for name in config.without if name in enabled]:  # the others would not be enabled anyway
        document["without"] = without
    emptied = {slot: "" for _, slot, *_ in base if slot in hooks.specs and not hooks.implementers(slot)}
    if defaults := dict(_in_tables({**emptied, **config.defaults}, base, hooks)):
        document["defaults"] = _ordered(defaults)
    for name, section in config.everything().items():
        values = {**plain(section), **config.as_written.get(name, {})}
        if name == "run":
            del values["name"]
        if values:
            document[name] = _ordered(values)
    return tomlkit.dumps(document)


def _in_tables(slots: Mapping[str, str], base: Mapping[Key, Any], hooks: Hooks) -> Iterator[tuple[str, Any]]:
    """Defaults as they stand in a file: those with a condition in its table."""
    conditions = {key[2]: key[1] for key in base if key[1] in CONDITIONAL}
    tables: dict[str, dict[str, str]] = {}
    for slot, name in sorted(slots.items()):
        if condition := conditions.get(slot, "" if slot in hooks.specs else "distributed"):
            tables.setdefault(condition, {})[slot] = name
        else:
            yield slot, name
    yield from tables.items()


def _ordered(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table without missing values, in which keys precede tables: TOML counts keys that follow a table as its own."""
    inner = {
        key: _ordered(value) if isinstance(value, Mapping) else [*map(_ordered, value)] if _are_tables(value) else value
        for key, value in table.items()
        if value is not None
    }
    return dict(sorted(inner.items(), key=lambda item: isinstance(item[1], dict) or _are_tables(item[1])))


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)

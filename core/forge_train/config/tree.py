"""Configured values by key, each with its origin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..base.names import canonical

Key = tuple[str, ...]
OriginKind = Literal["default", "plugin", "preset", "file", "FORGE_SET", "--set"]
LISTS = ("plugins", "without")
"""Top-level keys that hold lists of plugins."""
TOP_KEYS = (*LISTS, "preset", "defaults")
"""Top-level keys of a configuration, apart from sections."""
CONDITIONAL = ("distributed", "narrow", "fp16", "initialised", "required")
"""Tables of `[defaults]` that count only in several processes, where `train.precision` is not fp32, where it is fp16,
where `train.init_from` is set, and where an enabled plugin requires the slot: nobody looks for these plugins where
there is nothing for them to do."""


@dataclass(frozen=True)
class Origin:
    """Source of a value."""

    kind: OriginKind
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind

    @property
    def folder(self) -> Path:
        """Folder that relative paths in this source start from."""
        return Path(self.where.rpartition(":")[0]).parent if self.kind == "file" else Path()


DEFAULT = Origin("default")


@dataclass(frozen=True)
class Value:
    """One configured value."""

    value: Any
    origin: Origin
    read: Callable[[type, Key, str], Any] | None = None
    """Reads a text as the value of a section's key, where whoever wrote it could not know the key's type; raises a
    ValueError with a sentence for one that can't be meant."""


@dataclass
class Tree:
    """Configured values by key path; later ones replace earlier ones."""

    values: dict[Key, Value] = field(default_factory=dict)
    tables: dict[Key, Origin] = field(default_factory=dict)
    """Tables that were written, empty ones too."""
    mistakes: list[str] = field(default_factory=list)
    """Sentences about what was found wrong as the values were read."""
    aliases: Mapping[Key, Key] = field(default_factory=dict)
    """Keys that stand for others."""
    base: Mapping[Key, Any] = field(default_factory=dict)
    """Plugins and defaults beneath every configuration: they need not be written into a complete one."""
    source: str = ""
    """Name of the configuration, for the ids of runs."""
    parallel: Callable[[Collection[str]], type | None] = lambda names: None
    """Gives a section [parallel] with axes of packages, for the keys of that section; None for Forge's own. It raises a
    ConfigError for an axis that can't be used."""

    @classmethod
    def of(cls, table: Mapping[str, Any], source: str = "python") -> Tree:
        """The values of a dictionary of sections: `{"train": {"steps": 20}}`. Mistakes are noted, not raised."""
        tree, origin = cls(source=source), Origin("file", source)
        for key, value in leaves(table):
            name = canonical(key[0])
            if len(key) == 1 and name == "preset":
                tree.mistakes.append(f"{source}: preset: only files and commands name a preset.")
            elif len(key) == 1 and (value is TABLE) == (name in LISTS):
                expected = "a list of names" if name in LISTS else f"a section [{name}], which is a dictionary"
                tree.mistakes.append(f"{source}: {key[0]}: expected {expected}, found {table[key[0]]!r}.")
            elif value is TABLE:
                tree.tables[name, *key[1:]] = origin
            else:
                tree.put((name, *key[1:]), Value(value, origin))
        return tree

    def put(self, key: Key, value: Value) -> None:
        key = self.aliases.get(key, key)
        for other in [k for k in self.values if k[0] == key[0] and (k[: len(key)] == key or key[: len(k)] == k)]:
            del self.values[other]
        for table in [k for k in self.tables if len(k) > 1 and k[: len(key)] == key]:
            del self.tables[table]
        self.values[key] = value
        self.tables.setdefault(key[:1], value.origin)

    def below(self, prefix: Key) -> dict[Key, Value]:
        """Return the values under a table, by the rest of their path; empty tables inside it become empty values."""
        size = len(prefix)
        empty = {
            key: Value({}, origin)
            for key, origin in self.tables.items()
            if len(key) > 1 and key[:size] == prefix and not any(other[: len(key)] == key for other in self.values)
        }
        found = {**self.values, **empty}
        return {key[size:]: value for key, value in found.items() if key[:size] == prefix and len(key) > size}

    def drop(self, section: str) -> None:
        self.values = {key: value for key, value in self.values.items() if key[0] != section}
        self.tables = {key: origin for key, origin in self.tables.items() if key[0] != section}

    def sections(self) -> dict[str, Origin]:
        """Names of all sections, with where each was first written by the strongest layer."""
        found: dict[str, Origin] = {}
        for key, origin in self.tables.items():
            found.setdefault(key[0], origin)
        for key, value in self.values.items():
            if len(key) > 1 and _strength(value.origin) > _strength(found.get(key[0], DEFAULT)):
                found[key[0]] = value.origin
        return {name: origin for name, origin in found.items() if name not in TOP_KEYS}


def _strength(origin: Origin) -> int:
    return get_args(OriginKind).index(origin.kind)


TABLE = object()
"""Stands for a table among `leaves`, before what is in it."""


def leaves(table: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the values of nested tables by key path, and `TABLE` for each table."""
    for name, value in table.items():
        key = (*prefix, name)
        if isinstance(value, Mapping):
            yield key, TABLE
            yield from leaves(value, key)
        else:
            yield key, value

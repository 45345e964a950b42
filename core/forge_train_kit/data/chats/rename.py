"""Records whose fields and roles have other names than those that are read."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from forge_train import ConfigError
from forge_train.base.errors import nearest

from .calls import listed
from .records import SPEAKERS

_ENTRY = ("role", "content")
"""Targets that are fields of a message; all others are fields of a record."""
NAMES = (
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system", "history"),
    *("tools", "chosen", "rejected", "anchor", "positive", *_ENTRY),
)
"""Names that are read."""


def check_names(rename: Mapping[str, str], roles: Mapping[str, str], key: str) -> None:
    """Refuse a name that nothing reads, and a role that there is not.

    Args:
        rename, roles: see `renamed`.
        key: before `rename` and `roles` in messages.

    Raises:
        ConfigError: with the nearest that is read.
    """
    for name in rename:
        if name not in NAMES:
            raise ConfigError(
                f"{key}rename: no field {name!r} is read; expected {', '.join(NAMES)}.{nearest(name, NAMES)}"
            )
    for own, role in roles.items():
        if role not in SPEAKERS:
            raise ConfigError(
                f"{key}roles: {own} stands for {role!r}; expected {', '.join(SPEAKERS)}.{nearest(role, SPEAKERS)}"
            )


def check_used(rename: Mapping[str, str], roles: Mapping[str, str], used: Container[str], key: str) -> None:
    """Refuse a key that no record needed: it is a slip, and what it was to rename is still there under its own name.

    Args:
        rename, roles: see `renamed`.
        used: what `renamed` noted of all records.
        key: before `rename` and `roles` in messages.

    Raises:
        ConfigError: naming the key.
    """
    for name, own in rename.items():
        if f"rename.{name}" not in used:
            what = "message" if name in _ENTRY else "record"
            raise ConfigError(f"{key}rename: {name} = {own!r} is of no use: no {what} has a value there; leave it out.")
    for own, role in roles.items():
        if f"roles.{own}" not in used:
            raise ConfigError(
                f"{key}roles: {own} = {role!r} is of no use: no message has the role {own!r}; leave it out."
            )


def renamed(
    record: Mapping[str, Any],
    rename: Mapping[str, str],
    roles: Mapping[str, str],
    where: str,
    used: set[str] | None = None,
) -> Mapping[str, Any]:
    """The same record under the names that are read.

    Args:
        record: of a file.
        rename: the name to read, and the record's own for it, with dots where that is nested:
            `{"messages": "row.chat"}`. `role` and `content` are fields of each message.
        roles: the record's name of a role, and the role.
        where: the record's place, for messages.
        used: is given the keys that this record needed, for `check_used`.
    """
    used = set() if used is None else used
    if not rename and not roles:
        return record
    tops = {name: own for name, own in rename.items() if name not in _ENTRY}
    inner = {name: own for name, own in rename.items() if name in _ENTRY}
    found = {name: value for name, value in record.items() if name not in tops.values()}
    for name, own in tops.items():
        if (value := _at(record, own)) is not None:
            found[name] = value
            used.add(f"rename.{name}")
    for name, value in found.items():
        entries = listed(value, f"{where}: {name}")
        if isinstance(entries, list) and name != "tools":
            found[name] = [_entry(one, inner, roles, used) if isinstance(one, Mapping) else one for one in entries]
    return found


def _at(record: Mapping[str, Any], name: str) -> Any:
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    inner = record.get(first)
    return _at(inner, rest) if dot and isinstance(inner, Mapping) else None


def _entry(
    entry: Mapping[str, Any], inner: Mapping[str, str], roles: Mapping[str, str], used: set[str]
) -> dict[str, Any]:
    found = {name: value for name, value in entry.items() if name not in inner.values()}
    for name, own in inner.items():
        if (value := _at(entry, own)) is not None:
            found[name] = value
            used.add(f"rename.{name}")
    for name in ("role", "from"):
        role = found.get(name)
        if isinstance(role, str) and role in roles:
            found[name] = roles[role]
            used.add(f"roles.{role}")
    return found

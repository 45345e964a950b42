"""Values that are written as text, on the command line and in `FORGE_SET`."""

from __future__ import annotations

import re
import tomllib
import typing
from typing import Any

from forge_train.config.schema import FilePath, annotation_of, mark, members_of
from forge_train.config.tree import Key


def read_text(cls: type, key: Key, text: str) -> Any:
    """A value from the command line: read as its field's own type, else as TOML, else as a string.

    Raises:
        ValueError: for a path in quotation marks, which the shell has passed on.
    """
    value = _read(cls, key, text)
    if _in_quotes(value) and mark(cls, key, FilePath) is not None:
        raise ValueError(f"a path has no quotation marks around it here: {value[1:-1]}.")
    return value


def _read(cls: type, key: Key, text: str) -> Any:
    annotation = annotation_of(cls, key)
    members = members_of(annotation)
    if str in members and not (text.startswith(("[", "{")) and len(members) > 1):
        return text
    if any(typing.get_origin(member) is typing.Literal and text in typing.get_args(member) for member in members):
        return text
    if (value := _toml(text)) is not None or str in members:
        return text if value is None else value
    items = next((typing.get_args(m) for m in members if typing.get_origin(m) in (tuple, list)), None)
    if items is not None and not (text.startswith("[") and text.endswith("]")):
        numbers = None if str in members_of(items[0]) else _toml(f"[{text}]")
        return [part.strip() for part in text.split(",")] if numbers is None else numbers
    return float(text) if float in members and _DECIMAL.fullmatch(text) else text


def _in_quotes(value: Any) -> bool:
    """Return True if a text still has the quotation marks of a TOML string, which the shell has passed on."""
    return isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"


_DECIMAL = re.compile(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
"""Numbers that people write and TOML rejects, such as `1.` or `.5`."""


def _toml(text: str) -> Any:
    """The TOML value that a text is, or None; a text of several lines is none, lest more keys come with it."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return None
    return found["value"] if len(found) == 1 and "\n" not in text else None

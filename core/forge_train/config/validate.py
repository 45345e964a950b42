"""Strict validation of sections: every mistake at once, each with where it stands and what would be right."""

from __future__ import annotations

import dataclasses
import datetime
import json
import typing
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..base.errors import nearest
from ..base.names import is_file
from .schema import FilePath, annotation_of, mark, members_of, no_toml, table_type
from .tree import Key, Origin, Value


class Mistake(str):
    """A sentence that also knows which key it is about."""

    key: str

    def __new__(cls, text: str, key: str) -> Mistake:
        made = super().__new__(cls, text)
        made.key = key
        return made


def validate(name: str, cls: type, values: Mapping[Key, Value], mistakes: list[str]) -> Any:
    """Make a section from configured values; mistakes are appended, and the result is then None.

    Args:
        name: the section's name, for messages.
        cls: its dataclass.
        values: by key path inside the section.
        mistakes: gets one line for each.

    Raises:
        PluginError: if the class has an option of a type that no TOML value has.
    """
    import pydantic

    adapter = _adapter(cls)
    plain: dict[str, Any] = {}
    for key, value in values.items():
        try:
            read = value.read(cls, key, value.value) if value.read else value.value
        except ValueError as error:
            mistakes.append(Mistake(f"{value.origin}: {_dotted(name, key)}: {error}", _dotted(name, key)))
            return None
        if not _is_json(read):
            text = f"{value.origin}: {_dotted(name, key)}: dates and times are not used in configurations."
            mistakes.append(Mistake(text, _dotted(name, key)))
            return None
        if _is_huge(read):
            text = f"{value.origin}: {_dotted(name, key)}: expected a number of at most 64 bits, found {read}."
            mistakes.append(Mistake(text, _dotted(name, key)))
            return None
        _nest(plain, key, _absolute(cls, key, read, value.origin))
    try:
        return adapter.validate_json(json.dumps(plain), strict=True)
    except pydantic.ValidationError as error:
        seen: set[Key] = set()
        for problem in error.errors(include_url=False):
            key = _real_key(problem["loc"], plain)
            if key in seen and problem["type"] != "extra_forbidden":
                continue  # the other members of a union say the same of the same value
            seen.add(key)
            mistakes.append(Mistake(_sentence(name, cls, key, problem, values), _dotted(name, key)))
    return None


@lru_cache(1024)
def _adapter(cls: type) -> Any:
    import pydantic

    try:
        return pydantic.TypeAdapter(cls)
    except pydantic.PydanticSchemaGenerationError as error:
        raise no_toml(cls) from error


def _absolute(cls: type, key: Key, value: Any, origin: Origin) -> Any:
    """The value, as an absolute path if its field is a `FilePath`; those of a list's tables too."""
    if isinstance(value, list):
        return [
            {name: _absolute(cls, (*key, str(at), name), one, origin) for name, one in item.items()}
            if isinstance(item, dict)
            else item
            for at, item in enumerate(value)
        ]
    if not isinstance(value, str) or not value or (marked := mark(cls, key, FilePath)) is None or value in marked.words:
        return value
    if marked.dotted and not is_file(value):
        return value
    return str((origin.folder / Path(value).expanduser()).absolute())


def plain(section: Any) -> dict[str, Any]:
    """A section as JSON values."""
    return {f.name: _plain(getattr(section, f.name)) for f in dataclasses.fields(section)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return plain(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def _nest(table: dict[str, Any], key: Key, value: Any) -> None:
    for part in key[:-1]:
        table = table.setdefault(part, {})
    table[key[-1]] = value


def _is_huge(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= 2**63


def _is_json(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    if isinstance(value, dict):
        return all(_is_json(item) for item in value.values())
    return not isinstance(value, (datetime.date, datetime.time))


def _dotted(name: str, key: Key) -> str:
    return ".".join((name, *key))


def _real_key(location: tuple[int | str, ...], values: Any) -> Key:
    """pydantic's location without the union tags and list indices that are no keys. A table in a list has its place as
    a key."""
    key: list[str] = []
    for part in location:
        items = values[part : part + 1] if isinstance(values, list) and isinstance(part, int) else []
        if (isinstance(values, dict) and part in values) or any(isinstance(item, dict) for item in items):
            key.append(str(part))
            values = values[part]
        elif not key or isinstance(values, dict):
            key.append(str(part))  # a required key that is missing
            break
    return tuple(key)


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "dataclass_type": "a table",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def _sentence(name: str, cls: type, key: Key, problem: Any, values: Mapping[Key, Value]) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    origin = next((value.origin for k, value in values.items() if k[: len(key)] == key or key[: len(k)] == k), None)
    start = f"{origin}: {_dotted(name, key)}: " if origin else f"{_dotted(name, key)}: "
    if origin is None and not kind.startswith("missing"):
        start += "the default that its section declares: "
    found = problem["input"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        names = list(_field_names(cls, key[:-1]))
        known = f" [{'.'.join((name, *key[:-1]))}] has {', '.join(names)}." if names else f" [{name}] has no options."
        return f"{start}there is no such key.{nearest(key[-1], (*names, *getattr(cls, '__suggested__', ()))) or known}"
    if kind == "too_long" or (kind == "missing" and isinstance(problem["loc"][-1], int)):
        sizes = [len(typing.get_args(m)) for m in members_of(annotation_of(cls, key)) if typing.get_origin(m) is tuple]
        return f"{start}expected a list of {' or '.join(map(str, sizes))} values, found {found!r}."
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{start}is required."
    if kind == "literal_error":
        options = _options(cls, key)
        expected = " or ".join(repr(option) for option in options) or context.get("expected", "")
        return f"{start}expected {expected}, found {found!r}.{nearest(str(found), map(str, options))}"
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"{start}expected a number {words} {context[bound]}, found {found!r}."
    if kind in _EXPECTED:
        lost = _EXPECTED[kind] == "a list" and str(found)[:1] == "["
        hint = " If the shell took its quotation marks, put ' around the argument." if lost else ""
        return f"{start}expected {_EXPECTED[kind]}, found {found!r}.{hint}"
    if kind == "value_error":
        return f"{start}{context.get('error', problem['msg'])}"
    return f"{start}{problem['msg'][:1].lower()}{problem['msg'][1:]}, found {found!r}."


def _options(cls: type, key: Key) -> list[Any]:
    members = members_of(annotation_of(cls, key))
    return [option for m in members if typing.get_origin(m) is typing.Literal for option in typing.get_args(m)]


def _field_names(cls: type, key: Key) -> Iterator[str]:
    inner = table_type(annotation_of(cls, key)) if key else cls
    yield from (f.name for f in dataclasses.fields(inner)) if inner is not None else ()

"""JSON as its standard defines it. A number that is not finite becomes null, and its text is kept beside it.

`{"loss": nan, "curve": [1.0, inf]}` is written as
`{"loss": null, "curve": [1.0, null], "not_finite": {"loss": "nan", "curve[1]": "inf"}}`; `loads` puts the numbers back.

Of JSON that anybody may have written, `parse_json` reads a bounded depth; `files.load_json` reads a bounded size; `odd`
compares it with a shape.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

NOT_FINITE = "not_finite"
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""One object each, so that records with the same nan compare equal."""


def dumps(value: object, *, indent: int | None = None) -> str:
    """A value as JSON that every parser reads."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value, {}, ""), indent=indent, allow_nan=False)


def loads(text: str, *, unique: bool = False) -> Any:
    """Return the value that `dumps` was given, as far as JSON can express it.

    Args:
        text: the JSON.
        unique: whether to reject an object with a duplicate key, instead of taking the last value.

    Raises:
        ValueError: if the text is anything else.
    """
    try:
        if unique:
            return json.loads(text, object_pairs_hook=_unique)
        return json.loads(text, object_hook=_restored)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (LookupError, TypeError) as error:
        raise ValueError(f"what {NOT_FINITE!r} names is not there") from error


def _finite(value: Any, lost: dict[str, str], path: str) -> Any:
    """A value without numbers that are not finite; `lost` gets these by their path below the nearest object."""
    if isinstance(value, float) and not math.isfinite(value):
        lost[path] = str(float(value))
        return None
    if isinstance(value, Mapping):
        inner: dict[str, str] = {}
        table = {key: _finite(one, inner, str(key)) for key, one in value.items()}
        return {**table, NOT_FINITE: inner} if inner else table
    if isinstance(value, (list, tuple)):
        return [_finite(one, lost, f"{path}[{index}]") for index, one in enumerate(value)]
    return value


def _restored(table: dict[str, Any]) -> dict[str, Any]:
    lost = table.get(NOT_FINITE)
    if not isinstance(lost, dict):
        return table
    del table[NOT_FINITE]
    for path, text in lost.items():
        *above, last = [path] if path in table else _steps(path)
        holder: Any = table
        for step in above:
            holder = holder[step]
        holder[last] = _NUMBERS[text]
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        key, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key!r} is there {count} times; keep the one that is meant")
    return _restored(table)


def _steps(path: str) -> list[Any]:
    """`curve[1]` → "curve", 1."""
    indices: list[Any] = []
    while path.endswith("]"):
        before, _, number = path[:-1].rpartition("[")
        if not number.isdecimal():
            break
        path = before
        indices.append(int(number))
    return [path, *reversed(indices)]


DEEPEST = 100
"""Deepest nesting that is read: code that walks through JSON recurses once per level."""


def parse_json(text: str, *, unique: bool = False) -> Any:
    """Parse JSON from an untrusted source.

    Args:
        text: the JSON.
        unique: whether to reject duplicate keys, of which other programs may read the other value.

    Raises:
        ValueError: if it is not JSON, is nested deeper than `DEEPEST`, or has a duplicate key and `unique` is set.
    """
    value = loads(text, unique=unique)
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (dict, list))
        ]
    return value


# -- shapes ------------------------------------------------------------------------------------------

COUNT = range(2**63)
"""The shape of a number of things."""
NUMBER = (float, type(None))
PAIRS = [[COUNT, COUNT]]
"""The shape of ranges of data."""


def check_text(value: Any) -> None:
    """Check that every text in JSON can be printed.

    Raises:
        ValueError: where one holds a half of a character.
    """
    json.dumps(value, ensure_ascii=False).encode()


def odd(value: Any, shape: Any, name: str = "it") -> str:
    """Describe what is wrong with the shape of a value, in a phrase; empty if nothing is.

    Args:
        value: JSON.
        shape: a type; `COUNT`; a tuple of alternative shapes; a list with the shape of all entries, or with one shape
            for each of several; or a table with the shape of each key, where `key?` may be missing and `*` stands for
            all other keys; an empty tuple is the shape of a key that must not be there.
        name: of the value, in the phrase.
    """
    if isinstance(shape, tuple):
        problems = [odd(value, one, name) for one in shape]
        return "" if "" in problems else next(iter(problems), f"{name} is not known")
    if isinstance(shape, range):
        return "" if type(value) is int and value in shape else f"{name} is {str(value)[:40]!r}, which is no count"
    kinds: Any = list if isinstance(shape, list) else dict if isinstance(shape, Mapping) else shape
    number = kinds is float and isinstance(value, int)
    if not (number or isinstance(value, kinds)) or isinstance(value, bool) > (kinds is bool):
        return f"{name} is {_kind(value)}"
    said: Iterator[str]
    if isinstance(shape, list):
        if len(shape) > 1 and len(value) != len(shape):
            return f"{name} is a list of {len(value)}, not of {len(shape)}"
        shapes = shape if len(shape) > 1 else shape * len(value)
        said = (odd(*both, f"entry {at} of {name}") for at, both in enumerate(zip(value, shapes, strict=True)))
    elif isinstance(shape, Mapping):
        said = _odd_entries(value, shape, name)
    else:
        return f"{name} is too large" if isinstance(value, int) and abs(value) >= COUNT.stop else ""
    return next((one for one in said if one), "")


def _odd_entries(table: Mapping[str, Any], shape: Mapping[str, Any], name: str) -> Iterator[str]:
    inside = "" if name == "it" else f" of {name}"
    for key, one in shape.items():
        if (plain := key.removesuffix("?")) in table:
            yield odd(table[plain], one, f"{plain!r}{inside}")
        elif key == "*":
            others = [other for other in table if {other, f"{other}?"}.isdisjoint(shape)]
            yield from (odd(table[other], one, f"{other[:100]!r}{inside}") for other in others)
        elif key == plain:
            yield f"{name} lacks {key!r}"


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")

"""JSON as its standard defines it. A number that is not finite becomes null, and its text is kept beside it.

`{"loss": nan, "curve": [1.0, inf]}` is written as
`{"loss": null, "curve": [1.0, null], "not_finite": {"loss": "nan", "curve[1]": "inf"}}`; `loads` puts the numbers back.

Of JSON that anybody may have written, `parse_json` reads a bounded depth; `files.load_json` reads a bounded size.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
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
"""Lists and objects of JSON inside each other; who walks through them calls a function for each."""


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

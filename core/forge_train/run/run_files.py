"""The small JSON files of a run's folder, read with the shape that forge gives them: a damaged one is named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, describe
from ..base.files import load_json

_LARGEST = 64 << 20
"""Bytes of a file that are read."""
COUNT = range(2**63)
"""The shape of a number of things."""
NUMBER = (float, type(None))
PAIRS = [[COUNT, COUNT]]
"""The shape of ranges of data."""
SHAPES: Mapping[str, Any] = {
    "plugins.json": [{"name": str, "version": str, "hash": str, "distribution?": str, "object?": str}],
    "environment.json": {"devices?": [str], "argv?": [str], "git?": ({"commit": str, "dirty": bool}, type(None))},
    "composition.json": [{"phase": str, "plugin": str, "matched": [str], "note": str}],
    "outcome.json": {
        "outcome": str,
        "step": int,
        "loss": NUMBER,
        "code?": int,
        "error?": (dict, type(None)),
    },
    "left_out.json": PAIRS,
    ".roll_back.json": {"before": (COUNT, type(None)), "left_out": PAIRS, "elsewhere": COUNT, "*": ()},
}
"""File → what it holds, as `odd` takes it."""


def load(file: Path, *, links: bool = True) -> Any:
    """Return the content of a run's file; None if there is no such file.

    Args:
        file: one of `SHAPES`.
        links: whether it may be a link, as in a run's folder; a checkpoint may come from anyone.

    Raises:
        ConfigError: if it can't be read, or has the wrong shape.
    """
    try:
        if not file.exists():
            return None
        found = load_json(file, most=_LARGEST, links=links)
        check_text(found)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: can't be read: {describe(error).partition(chr(10))[0][:200]}.") from error
    if problem := odd(found, SHAPES[file.name]):
        raise ConfigError(f"{file}: can't be read: {problem}. Put it back as it was.")
    return found


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

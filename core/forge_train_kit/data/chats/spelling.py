"""Misspelt keys: data has keys of its own, so that only those that are almost one that is read are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forge_train import ConfigError

_WORDS = frozenset({"context", "reasoning_context", "trail", "trait", "tool"})
"""Keys that people mean, although they are one letter from one that is read."""


def check_spelling(fields: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse a key that is one slip from a known key that is not there: a letter too many, too few or wrong, two that
    changed places, or other capitals or underscores.

    Raises:
        ConfigError: naming both.
    """
    for name in known:
        if name in fields:
            continue
        for key, value in fields.items():
            if value not in (None, "") and key not in _WORDS and _slip(str(key), name):
                raise ConfigError(f"{where}: {key!r} is not read. Did you mean {name!r}? If not, give it another name.")


def _slip(key: str, name: str) -> bool:
    a, b = (one.casefold().replace("_", "").replace("-", "") for one in (key, name))
    if a == b:
        return True
    if a[:1] != b[:1] or abs(len(a) - len(b)) > 1:
        return False
    if len(a) != len(b):
        short, long = sorted((a, b), key=len)
        return any(long[:at] + long[at + 1 :] == short for at in range(len(long)))
    wrong = [at for at in range(len(a)) if a[at] != b[at]]
    first, last = wrong[0], wrong[-1] + 1
    return len(wrong) == 1 or (len(wrong) == last - first == 2 and a[first:last] == b[first:last][::-1])

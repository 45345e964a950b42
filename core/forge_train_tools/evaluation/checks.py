"""Checks of a generated answer. None of them runs what a model wrote; a function of the user's does what it says."""

from __future__ import annotations

import inspect
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from forge_train.base.errors import ConfigError, describe, nearest
from forge_train.base.names import import_module, split

Check = Callable[[str, Sequence[str], Mapping[str, Any]], float]
"""Answer, right answers and record → 1.0 if it is right, 0.0 if not, or a share."""


def _exact(answer: str, right: Sequence[str], record: Mapping[str, Any]) -> float:
    return float(answer.strip() in {one.strip() for one in right})


def _normalised(answer: str, right: Sequence[str], record: Mapping[str, Any]) -> float:
    return float(normal(answer) in {*map(normal, right)})


def _regex(answer: str, right: Sequence[str], record: Mapping[str, Any]) -> float:
    return float(any(re.search(one, answer) for one in right))


def normal(text: str) -> str:
    """Lower case, without punctuation and articles, with single spaces: as SQuAD's own script does (Rajpurkar et al.
    2016, arXiv:1606.05250)."""
    bare = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


OWN: Mapping[str, Check] = {"exact": _exact, "normalised": _normalised, "regex": _regex}


def is_empty(name: str, right: str) -> bool:
    """True if nothing is left of a right answer to one of our own checks, so that an empty answer would be right."""
    return not (right if name == "regex" else normal(right) if name == "normalised" else right.strip())


def text(name: str, check: Check) -> str:
    """A check as text: its name, or a function's source if there is one."""
    try:
        return name if name in OWN else inspect.getsource(check)
    except (OSError, TypeError):
        return name


def find(name: str, where: str) -> Check:
    """A check by its name, or a function by `package.module:function` or `file.py:function`.

    Args:
        name: the name.
        where: the key, for messages.

    Raises:
        ConfigError: there is none.
    """
    if name in OWN:
        return OWN[name]
    attribute = split(name)[1]
    if not attribute:
        known = ", ".join(OWN)
        raise ConfigError(
            f"{where}: expected {known}, package.module:function or file.py:function, found {name!r}."
            f"{nearest(name, OWN)}"
        )
    try:
        function = getattr(import_module(name), attribute)
    except Exception as error:  # whatever a stranger's module does while it is imported
        raise ConfigError(f"{where}: {name!r} can't be imported: {describe(error)}.") from error
    if not callable(function):
        raise ConfigError(f"{where}: {name!r} is no function.")

    @wraps(function)
    def check(answer: str, right: Sequence[str], record: Mapping[str, Any]) -> float:
        try:
            found = function(answer, dict(record))
        except Exception as error:
            raise ConfigError(f"{where}: {name} failed: {describe(error)} (answer {answer[:80]!r}).") from error
        if not isinstance(found, (bool, int, float)) or not math.isfinite(found) or not 0 <= found <= 1:
            raise ConfigError(f"{where}: {name} must return true, false or a number from 0 to 1, found {found!r}.")
        return float(found)

    return check

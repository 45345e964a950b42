"""Flags and weights of messages, which say how much is learned of them, and flags of whole records, which are not
read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from forge_train import ConfigError

from .calls import plain

FLAGS = ("train", "training", "loss_mask", "weight")
"""Names of a message's flag that keeps it from being learned; `weight` may also say how much its tokens count."""
_LIGHT, _HEAVY = 1e-6, 1e6
"""Weights beyond these are taken for mistakes."""
_TRUTHS = {"true": True, "yes": True, "false": False, "no": False}


def take_weight(message: dict[str, Any], where: str) -> float:
    """Remove a message's flags, and return its weight: 1 if it has none.

    Raises:
        ConfigError: a flag has another value, or two contradict each other; or the message is not the assistant's, and
            has a weight other than 0 and 1.
    """
    flags = {name: message.pop(name) for name in FLAGS if name in message}
    for name, value in flags.items():
        heavy = name == "weight" and isinstance(value, int | float) and _LIGHT <= value <= _HEAVY
        if value not in (0, 1) and not heavy:
            other = f" or a weight from {_LIGHT:g} to {_HEAVY:g}" if name == "weight" else " or 1"
            raise ConfigError(f"{where}: {name} is {value!r}; expected 0 (not learned){other}.")
    if len({bool(value) for value in flags.values()}) > 1:
        raise ConfigError(f"{where}: {' and '.join(flags)} contradict each other.")
    weight: float = flags.get("weight", 1) if all(flags.values()) else 0
    if weight not in (0, 1) and (role := message["role"]) != "assistant":
        raise ConfigError(
            f"{where}: weight is {weight!r}, and the role is {role}: only the assistant's messages have weights "
            "other than 0 and 1; leave it out."
        )
    return weight


def check_whole(fields: Mapping[str, Any], where: str) -> None:
    """Refuse a flag of a whole record that would keep it from being learned, or learn it more.

    Text is taken as in CSV, which knows no numbers: `0.5`, `false` or a list of masks.

    Raises:
        ConfigError: naming the flag.
    """
    for name in FLAGS:
        value = written(fields.get(name))
        if isinstance(value, list | dict) or (isinstance(value, int | float) and value != 1):
            raise ConfigError(f"{where}: {name} of a whole record is not read: give it to messages, or leave it out.")


def written(value: Any) -> Any:
    """The number, truth, list or object that a value is, or that its text stands for, as in CSV.

    An empty text is None; any other text stays.
    """
    if not isinstance(value, str):
        return plain(value)
    text = value.strip()
    if text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    try:
        return float(text) if text else None
    except ValueError:
        pass
    if text[0] in "[{":
        with contextlib.suppress(ValueError, RecursionError):  # then it is a text like any other
            return plain(json.loads(text))
    return value

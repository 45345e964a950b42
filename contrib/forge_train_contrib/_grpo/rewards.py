"""Rewards: functions found by name, and what they may return."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from forge_train import ConfigError
from forge_train.base.errors import ForgeError, describe, nearest
from forge_train.base.names import import_module, is_file, split

EXACT = "exact"
ANSWER = "answer"
"""Field of a record with the right answer, for `exact`."""


def find(name: str) -> tuple[Callable[..., Any] | None, str]:
    """The function that a name stands for, and what is wrong with the name; None for `exact`."""
    if name == EXACT:
        return None, ""
    where, function = split(name)
    if not function:
        return None, f"{name!r} names no function; expected package.module:function, file.py:function or {EXACT}."
    if is_file(name) and not Path(where).is_file():
        return None, f"there is no file {where}."
    try:
        module = import_module(name)
    except (Exception, SystemExit) as error:  # whatever somebody's module does while it is imported
        return None, f"{where} can't be imported: {describe(error)}"
    found = getattr(module, function, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        return None, f"{where} has no function {function!r}.{nearest(function, known)}"
    try:
        inspect.signature(found).bind("prompt", "answer", {})
    except (TypeError, ValueError):
        return None, f"{name} must take three arguments: prompt, answer and record, or lists of them."
    return found, ""


class Reward:
    """A function of a prompt, an answer and a record; or of lists of them, if its first parameter is named `prompts`.

    Args:
        name: of the configuration.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._function, problem = find(name)
        if problem:
            raise ConfigError(f"grpo.reward: {problem}")
        first = next(iter(inspect.signature(self._function).parameters), "") if self._function else ""
        self._together = first == "prompts"

    def __call__(
        self, prompts: Sequence[str], answers: Sequence[str], records: Sequence[Mapping[str, Any]], where: Sequence[str]
    ) -> list[float]:
        """The reward of each answer.

        Args:
            prompts: as the model reads them.
            answers: as it wrote them.
            records: of the prompts.
            where: each prompt's file and place, for messages.

        Raises:
            ForgeError: the function fails, or returns what is no reward.
        """
        if self._function is None:
            return [
                float(answer.strip() == str(one[ANSWER]).strip()) for answer, one in zip(answers, records, strict=True)
            ]
        if self._together:
            found = self._called(
                f"for the {len(answers)} answers of a rollout", list(prompts), list(answers), list(records)
            )
            if isinstance(found, str) or not hasattr(found, "__len__") or not hasattr(found, "__iter__"):
                raise ForgeError(f"{self._who} must return a list of rewards, and returned {_shown(found)}.")
            if len(found) != len(answers):
                raise ForgeError(f"{self._who} was given {len(answers)} answers, and returned {len(found)} rewards.")
            each = list(found)
        else:
            rows = zip(prompts, answers, records, where, strict=True)
            each = [self._called(f"for the prompt at {place}", *row) for *row, place in rows]
        return [self._number(value, place) for value, place in zip(each, where, strict=True)]

    @property
    def _who(self) -> str:
        return f"grpo.reward: {self._name}"

    def _called(self, what: str, *arguments: Any) -> Any:
        try:
            return self._function(*arguments)  # type: ignore[misc]
        except Exception as error:
            raise ForgeError(f"{self._who} failed {what}: {describe(error)}") from error

    def _number(self, value: Any, where: str) -> float:
        if getattr(value, "shape", None) == ():
            value = value.item()
        if not isinstance(value, Real):
            raise ForgeError(
                f"{self._who} must return a number, and returned {_shown(value)} for the prompt at {where}."
            )
        if not math.isfinite(value):
            raise ForgeError(
                f"{self._who} returned {float(value)} for the prompt at {where}; a reward is a finite number."
            )
        return float(value)


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r:.40}"

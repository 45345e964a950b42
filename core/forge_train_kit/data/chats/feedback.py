"""Feedback: an answer, and whether it is desirable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forge_train import ConfigError

from .flags import written
from .records import Conversation, conversation
from .spelling import check_spelling


def feedback(record: Mapping[str, Any], where: str = "this record") -> tuple[Conversation, bool]:
    """`{"prompt", "completion", "label"}`, or a conversation of another shape with a `label`, as TRL's unpaired
    preferences; the conversation up to its answer, and the label.

    The answer is the completion, or the last message of a conversation without one; only that is learned. In tables of
    text, such as CSV, a label is the word true or false.

    Raises:
        ConfigError: as of `conversation`; or the label is missing or no boolean, the answer is empty, or the assistant
            doesn't have the last word.
    """
    fields = {name: value for name, value in record.items() if name != "label"}
    check_spelling(record, ("label",), where)
    if {"chosen", "rejected"} <= fields.keys():
        raise ConfigError(f"{where}: chosen and rejected are a pair of answers; feedback is one answer with a label.")
    label = written(record.get("label"))
    if label is None:
        raise ConfigError(f"{where}: there is no label; expected true (a desirable answer) or false.")
    if not isinstance(label, bool):
        raise ConfigError(f"{where}: label is {record['label']!r}; expected true (a desirable answer) or false.")
    found = conversation(fields, where)
    last = len(found.messages) - 1
    if (role := found.messages[last]["role"]) != "assistant":
        raise ConfigError(
            f"{where}: the last message is the {role}'s, but the label judges an answer of the assistant."
        )
    found = replace(found, context=found.context or last)
    if found.silent:
        raise ConfigError(f"{where}: the answer is empty, so that there is nothing to judge.")
    if any(message.get("weight", 1) not in (0, 1) for message in found.messages):
        raise ConfigError(f"{where}: a message of feedback has a weight of 0 or 1: answers are judged as a whole.")
    return found, label

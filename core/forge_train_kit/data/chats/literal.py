"""Special tokens in what messages say that are to stay text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from forge_train import ConfigError

from .records import REASONING, Conversation, Message
from .template import Span, Template
from .variations import THOUGHT_MARKS

_WORDS = ("content", *REASONING)
"""Fields of a message that are its words."""


@runtime_checkable
class LiteralEncoder(Protocol):
    """A tokenizer that can leave special tokens in a text as text."""

    @property
    def special_tokens(self) -> Sequence[str]: ...

    def encode_with_literals(self, text: str, literal: Sequence[Span]) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and the characters of each, where special tokens in the spans are text like any other."""
        ...


def literal_spans(template: Template, conversation: Conversation, text: str, special: Sequence[str]) -> list[Span]:
    """Start and end of the special tokens that stand in the words of messages, in a rendering.

    Found by rendering the conversation with a placeholder for each. Marks of thoughts in what the assistant says, such
    as `[THINK]`, stay tokens.

    Args:
        template: which rendered it.
        conversation: the record.
        text: its rendering.
        special: tokens.

    Raises:
        ConfigError: the template writes something else where a message holds a special token.
    """
    if not special or not any(
        token in str(message.get(name)) for token in special for message in conversation.messages for name in _WORDS
    ):
        return []
    word = "Sentinel"
    while word in text or word in repr(conversation.messages):
        word += "s"
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    kept: list[str] = []

    def placed(message: Message) -> Message:
        def place(match: re.Match[str]) -> str:
            if message["role"] == "assistant" and THOUGHT_MARKS.fullmatch(match.group()):
                return match.group()
            kept.append(match.group())
            return f"{word}{len(kept) - 1}x"

        words: dict[str, Any] = {name: message[name] for name in _WORDS if isinstance(message.get(name), str)}
        return {**message, **{name: pattern.sub(place, value) for name, value in words.items()}}

    other, _ = template.render([placed(message) for message in conversation.messages], conversation.tools)
    pieces = re.split(rf"{word}(\d+)x", other)
    pieces[1::2] = [kept[int(number)] for number in pieces[1::2]]
    if "".join(pieces) != text:
        raise ConfigError(
            f"{conversation.where}: {template.name} reads special tokens in what a message says, so they can't stay "
            "text; leave them out of the record, or set split_special_tokens to false."
        )
    ends = list(itertools.accumulate(map(len, pieces)))
    return [(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=False)]

"""Special tokens in messages, calls and tools that are to stay text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from forge_train import ConfigError

from .records import REASONING, Conversation, Message
from .template import Span, Template
from .variations import THOUGHT_MARKS

_WORDS = ("content", *REASONING)
"""Fields of a message that are its words, in which the assistant may mark its thoughts."""


@runtime_checkable
class LiteralEncoder(Protocol):
    """A tokenizer that can leave special tokens in a text as text."""

    @property
    def special_tokens(self) -> Sequence[str]: ...

    def encode_with_literals(self, text: str, literal: Sequence[Span]) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and the characters of each, where special tokens in the spans are text like any other."""
        ...


def literal_spans(
    template: Template,
    conversation: Conversation,
    text: str,
    special: Sequence[str],
    *,
    key: str = "split_special_tokens",
) -> list[Span]:
    """Start and end of the special tokens that stand in messages and tools, in a rendering.

    Found by rendering the conversation with a placeholder for each. Marks of thoughts in what the assistant says, such
    as `[THINK]`, stay tokens.

    Args:
        template: which rendered it.
        conversation: the record.
        text: its rendering.
        special: tokens.
        key: of the option that asks for this, for messages.

    Raises:
        ConfigError: the template writes something else where a message holds a special token.
    """
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
    word, kept = "Sentinel", list[str]()
    while word in text or word in repr((conversation.messages, conversation.tools)):
        word += "s"

    def place(match: re.Match[str]) -> str:
        kept.append(match.group())
        return f"{word}{len(kept) - 1}x"

    def place_words(match: re.Match[str]) -> str:
        return match.group() if THOUGHT_MARKS.fullmatch(match.group()) else place(match)

    def placed(message: Message) -> Message:
        words = _WORDS if message["role"] == "assistant" else ()
        return {name: _replaced(value, pattern, place_words if name in words else place)
                for name, value in message.items()}  # fmt: skip

    messages = [placed(message) for message in conversation.messages]
    tools = _replaced(list(conversation.tools), pattern, place)
    if not kept:
        return []
    other, _ = template.render(messages, tools)
    pieces = re.split(rf"{word}(\d+)x", other)
    pieces[1::2] = [kept[int(number)] for number in pieces[1::2]]
    if "".join(pieces) != text:
        raise ConfigError(
            f"{conversation.where}: {template.name} reads special tokens in a message or a tool, so they can't stay "
            f"text; leave them out of the record, or do not set {key}."
        )
    ends = list(itertools.accumulate(map(len, pieces)))
    return [(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=False)]


def _replaced(value: Any, pattern: re.Pattern[str], place: Callable[[re.Match[str]], str]) -> Any:
    """The same value, with every match in its strings and keys replaced."""
    if isinstance(value, str):
        return pattern.sub(place, value)
    if isinstance(value, Mapping):
        return {pattern.sub(place, key): _replaced(item, pattern, place) for key, item in value.items()}
    return [_replaced(item, pattern, place) for item in value] if isinstance(value, list) else value

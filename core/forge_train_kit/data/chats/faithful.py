"""Compares a rendering with its record: a template that leaves something out does so without a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from forge_train import ConfigError

from .records import REASONING, Conversation, Message
from .template import Template


def check_written(template: Template, conversation: Conversation, text: str) -> None:
    """Refuse a conversation of which the template leaves something out.

    Everything is found by rendering the conversation without it: if the text stays the same, it was not in the text.
    Thoughts of earlier turns may be left out, as Qwen3's template does, if the template writes them while the turn is
    the last one.

    Args:
        template: which rendered the conversation.
        conversation: the record.
        text: its rendering.

    Raises:
        ConfigError: naming the record and its fields that are not in the text.
    """
    missing = list(_missing(template, conversation, text))
    if missing:
        raise ConfigError(
            f"{conversation.where}: {template.name} leaves out {', '.join(missing)}. Take a template that writes this, "
            "or leave it out of the record."
        )


def _missing(template: Template, conversation: Conversation, text: str) -> Iterator[str]:
    messages, tools = list(conversation.messages), conversation.tools
    if tools and _render(template, messages, ()) == text:
        yield "tools"
    for at, message in enumerate(messages):
        content = str(message.get("content") or "").strip()
        if content and (len(content) < _SURE or content not in text):
            other = {**message, "content": f"{content} {_unused(text)}"}
            if _render(template, _with(messages, at, other), tools) == text:
                yield f"messages[{at}] ({message['role']})"
                continue
        if message.get("tool_calls"):
            called = {key: value for key, value in message.items() if key != "tool_calls"}
            if _render(template, _with(messages, at, {"content": "", **called}), tools) == text:
                yield f"messages[{at}].tool_calls"
        if at in conversation.learned and (
            names := [name for name in REASONING if str(message.get(name) or "").strip()]
        ):
            thoughtless = {key: value for key, value in message.items() if key not in REASONING}
            alone = _render(template, messages[: at + 1], tools)
            if _render(template, _with(messages, at, thoughtless), tools) == text and (
                alone is None or _render(template, [*messages[:at], thoughtless], tools) == alone
            ):
                yield f"messages[{at}].{names[0]}"


_SURE = 24
"""Characters of a message that are not in a rendering by chance."""


def _with(messages: Sequence[Message], at: int, message: Message) -> list[Message]:
    return [*messages[:at], message, *messages[at + 1 :]]


def _render(template: Template, messages: Sequence[Message], tools: Sequence[Any]) -> str | None:
    """None where the template refuses this variation, which therefore matters to it."""
    try:
        return template.render(messages, tools)[0]
    except ConfigError:
        return None


def _unused(text: str) -> str:
    word = "Sentinel"
    while word in text:
        word += "s"
    return word

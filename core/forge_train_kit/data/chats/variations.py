"""Variations of a conversation, rendered: with sentinels in place of a message's strings, or without what follows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from forge_train import ConfigError

from .records import Message
from .template import Template

_KEPT = ("role", "type", "id", "tool_call_id", "name")
"""Keys whose strings templates compare or check; sentinels leave them."""
THOUGHT_MARKS = re.compile(r"(?:\s|<[^<>]*think[^<>]*>|\[/?think\])*", re.IGNORECASE)
"""Marks that may stand around thoughts: `<think>`, `[/THINK]`, `<|START_THINKING|>` and spaces."""


class Variations:
    """A conversation whose messages can be replaced.

    Args:
        template: which renders it.
        messages: all of it.
        tools: of the conversation.
        text: its rendering.
    """

    def __init__(self, template: Template, messages: Sequence[Message], tools: Sequence[Any], text: str) -> None:
        self.template, self.messages, self.tools = template, list(messages), tools
        self._replaced: dict[int, tuple[Message, str | None]] = {}
        self._word = "Sentinel"
        everything = text + repr((self.messages, tools))  # prompts may hold what the text does not
        while self._word in everything:
            self._word += "s"

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str | None:
        """None where the template refuses this variation."""
        try:
            return self.template.render(messages, self.tools, generation_prompt=prompt)[0]
        except ConfigError:
            return None

    def header(self) -> str:
        """Return the text that a generation prompt adds to a user's message; empty if it adds nothing."""
        user = [{"role": "user", "content": "And then?"}]
        closed, prompt = self.render(user), self.render(user, prompt=True)
        return prompt[len(closed) :] if closed and prompt and prompt.startswith(closed) else ""

    def replace(self, turn: int) -> tuple[Message, str | None]:
        """A message with a sentinel for each of its strings, and the rendering of the conversation with it.

        Names of tools stay, unless the template writes no other string of the message.
        """
        if turn in self._replaced:
            return self._replaced[turn]
        message, whole = self.messages[turn], None
        for kept in (_KEPT, _KEPT[:-1]):
            numbers = itertools.count(1)

            def marked(text: str, numbers: Iterator[int] = numbers) -> str:
                called = not text and self.messages[turn].get("tool_calls")  # templates ask whether words go with it
                return text if called else self.sentinel(turn, next(numbers))

            message = _map_strings(self.messages[turn], marked, kept)
            whole = self.render([*self.messages[:turn], message, *self.messages[turn + 1 :]])
            if whole is not None and self._mark(turn) in whole:
                break
        self._replaced[turn] = message, whole
        return message, whole

    def _mark(self, turn: int) -> str:
        return f"{self._word}{turn}x"

    def sentinel(self, turn: int, number: int) -> str:
        return f"{self._mark(turn)}{number}x"

    def around(self, text: str | None, turn: int) -> tuple[str, str] | None:
        """Return the text around all sentinels of a message; None if one of them is there twice, or none is."""
        found = list(re.finditer(rf"{self._mark(turn)}\d+x", text or ""))
        if text is None or not found or len({match.group() for match in found}) < len(found):
            return None
        return text[: found[0].start()], text[found[-1].end() :]


def _map_strings(value: Any, change: Callable[[str], str], kept: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: item if key in kept else _map_strings(item, change, kept) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change, kept) for item in value]
    return change(value) if isinstance(value, str) else value

"""Positions of the assistant's turns in a rendering, found by rendering variations of the conversation.

A turn is what the model writes at inference: it begins where the generation prompt ends, and ends with its closing
token. A template is a program, so each border is found by a method that verifies itself on the final rendering:

- The end: the strings of the turn are replaced by sentinels. The text that the template writes after the last one must
  also end the final rendering, so its length gives the end of the turn's own words. The first part of this text that is
  the same whatever follows the turn, up to its last added token (`<|im_end|>`), ends the turn. If the last turn ends
  with a different token than earlier ones (gpt-oss), the first added token ends it. A header's token never ends a turn.
- The start, by the first of these that holds:
  1. the messages before the turn, rendered with a generation prompt, begin the final rendering;
  2. the same, starting from the message before the turn: sentinels in that message make the text after it comparable
     even if the template rewrites older messages (Qwen3 drops thoughts of earlier turns);
  3. likewise, with the header that the template writes before plain words, if a generation prompt begins with it and
     has more (DeepSeek-R1 opens thoughts there, and drops them from the rendering);
  4. likewise, with the common prefix of a generation prompt and the rendering, if the rest of the prompt is only marks
     of thoughts (Command A opens thoughts where a turn without any begins its response);
  5. the text that the template writes before the turn's own words ends with the generation prompt, except for marks of
     thoughts: a prompt may open thoughts (`<think>\\n`) where a turn without any has `<think></think>`. Their common
     prefix is given to the model.

Tool results are cut out of a turn, both in messages that the template writes inside the turn that called the tools
(Gemma 4), and in the turn's own message.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from forge_train import ConfigError

from .records import Message, common
from .template import Span, Template
from .variations import THOUGHT_MARKS, Variations

_RESULTS = ("tool_responses", "tool_results")
"""Keys of an assistant's message that hold what tools answered, which is not learned."""


class Turns:
    """The turns of one conversation in its rendering.

    Args:
        template: which renders it.
        messages: all of it.
        tools: of the conversation.
        text: its rendering.
    """

    def __init__(self, template: Template, messages: Sequence[Message], tools: Sequence[Any], text: str) -> None:
        self._template, self._messages, self._text = template, list(messages), text
        self._varied = Variations(template, messages, tools, text)
        self._added = re.compile("|".join(map(re.escape, sorted(template.tokens, key=len, reverse=True))) or "(?!)")
        self._openers = self._opening_tokens()

    def spans(self, turn: int) -> list[Span]:
        """The parts of an assistant's message in the text, apart where outputs of tools are inside; none if left out.

        Raises:
            ConfigError: they can't be told for sure.
        """
        found = self._span(turn)
        if found is None:
            return []
        parts: list[Span] = []
        start, stop = found
        for begin, end in sorted([*self._outputs(turn, found), *self._results(turn)]):
            if start < (first := min(begin, stop)):
                parts.append((start, first))
            start = max(start, min(end, stop))
        return [*parts, (start, stop)] if start < stop else parts

    def _span(self, turn: int) -> Span | None:
        """Start and end of an assistant's message in the text; None where the template leaves it out.

        Raises:
            ConfigError: they can't be told for sure.
        """
        _, whole = self._varied.replace(turn)
        if whole == self._text:
            return None
        if around := self._varied.around(whole, turn):
            before, after = around
            start, end = self._start(turn, before), self._end(turn, after)
            if start is not None and end is not None and start <= end:
                return start, end
        raise self._unsure(turn)

    def _unsure(self, turn: int) -> ConfigError:
        return ConfigError(
            f"{self._template.name}: where the assistant's message {turn}, counted from 0, begins and ends can't be "
            "told for sure; put {% generation %} and {% endgeneration %} around what is to be learned in the template."
        )

    def _results(self, turn: int) -> list[Span]:
        """Start and end of what tools answered according to the assistant's message itself; empty without.

        Found by rendering the conversation without it.

        Raises:
            ConfigError: it can't be told for sure.
        """
        message = {key: value for key, value in self._messages[turn].items() if key not in _RESULTS}
        if len(message) == len(self._messages[turn]):
            return []
        other = self._varied.render([*self._messages[:turn], message, *self._messages[turn + 1 :]])
        if other is None or len(other) >= len(self._text):
            raise ConfigError(
                f"{self._template.name}: what tools answered inside the assistant's message {turn}, counted from 0, "
                "can't be told from the rest; give it as messages of the role tool."
            )
        start, more = self._snapped(self._text, common(self._text, other)), len(self._text) - len(other)
        if other[start:] != self._text[start + more :]:
            raise ConfigError(
                f"{self._template.name} writes more than what tools answered if the assistant's message {turn}, "
                "counted from 0, holds it; give it as messages of the role tool."
            )
        return [(start, start + more)]

    def _snapped(self, text: str, at: int) -> int:
        """The same place, or the beginning of the added token that it lies in."""
        return next((one.start() for one in self._added.finditer(text) if one.start() < at < one.end()), at)

    def _outputs(self, turn: int, span: Span) -> list[Span]:
        """Outputs of tools, with their marks, that the template writes inside a turn, in order."""
        results = list(
            itertools.takewhile(lambda at: self._messages[at]["role"] == "tool", range(turn + 1, len(self._messages)))
        )
        if not (inside := [at for at in results if self._inside(at, span)]):
            return []
        cuts = [found] if (found := self._inserted(turn, results)) else [self._inserted(turn, [at]) for at in inside]
        if None in cuts:
            raise self._unsure(turn)
        return sorted(cut for cut in cuts if cut)

    def _inside(self, at: int, span: Span) -> bool:
        around = self._varied.around(self._varied.replace(at)[1], at)
        return around is not None and self._text.startswith(around[0]) and span[0] <= len(around[0]) < span[1]

    def _inserted(self, turn: int, removed: Sequence[int]) -> Span | None:
        """Return the span of text that disappears without some messages; None if it is not a single span."""
        message = dict(self._messages[turn])
        if message.get("content"):
            message["content"] = self._varied.sentinel(turn, 1)
        others = [*self._messages[:turn], message, *self._messages[turn + 1 :]]
        long = self._varied.render(others) or ""
        short = self._varied.render([one for at, one in enumerate(others) if at not in removed]) or ""
        length, last = len(long) - len(short), common(long, short)
        inside = {at for match in self._added.finditer(long) for at in range(match.start() + 1, match.end())}
        for start in range(last, -1, -1):
            if length <= 0 or long[start + length :] != short[start:]:
                return None
            if not {start, start + length} & inside:
                return (start, start + length) if self._text.startswith(long[: start + length]) else None
        return None

    def _end(self, turn: int, after: str) -> int | None:
        """Return where the turn ends, if the text ends with `after`, which the template writes after its words."""
        if not self._text.endswith(after):
            return None
        last = turn == len(self._messages) - 1
        closed = [*self._messages[:turn], self._varied.replace(turn)[0]]
        following = [{"role": "user", "content": "And then?"}] if last else []
        around = self._varied.around(self._varied.render([*closed, *following]), turn)
        if not around and not last:
            return None
        same = common(after, around[1]) if around else len(after)
        length = self._ending(after, same)
        first = self._added.match(after)
        if not length and first and first.group() not in self._openers:
            prompt = None if last else self._varied.around(self._varied.render(closed, prompt=True), turn)
            same = len(after) if last else common(after, prompt[1]) if prompt else 0
            length = first.end() if first.end() <= same else 0
        return len(self._text) - len(after) + length

    def _ending(self, after: str, same: int) -> int:
        """Return how many of the first `same` characters after a turn's words end it: up to their last added token."""
        end = 0
        for match in self._added.finditer(after):
            if match.end() > same or match.group() in self._openers:
                return end or min(same, match.start())
            end = match.end()
        return end or same

    def _opening_tokens(self) -> frozenset[str]:
        """Added tokens of headers, before the first words and in a generation prompt, but for those that end words."""
        user = {"role": "user", "content": self._varied.sentinel(0, 1)}
        answer = {"role": "assistant", "content": self._varied.sentinel(1, 1)}
        varied = self._varied
        tools, varied.tools = varied.tools, ()  # descriptions of tools show tokens that are none of a header
        asked, answered = (
            self._varied.around(self._varied.render([user]), 0),
            self._varied.around(self._varied.render([user, answer]), 1),
        )
        written = [self._varied.header(), asked[0] if asked else ""]
        varied.tools = tools
        ends = [self._added.match(around[1].lstrip()) for around in (asked, answered) if around]
        found = {token for text in written for token in self._added.findall(text)}
        return frozenset(found - {end.group() for end in ends if end})

    def _start(self, turn: int, before: str) -> int | None:
        """Return where the turn starts, given what the template writes before the turn's own words."""
        prompt = self._varied.render(self._messages[:turn], prompt=True)
        if prompt is not None and self._text.startswith(prompt):
            return len(prompt)
        if turn and (start := self._start_after(turn)) is not None:
            return start
        return self._after_header(before) if self._text.startswith(before) else None

    def _start_after(self, turn: int) -> int | None:
        """The same by what follows the words of the message before it."""
        replaced, whole = self._varied.replace(turn - 1)
        earlier, here = [*self._messages[: turn - 1], replaced], self._varied.around(whole, turn - 1)
        prompt = self._varied.around(self._varied.render(earlier, prompt=True), turn - 1)
        if not here or not prompt or not self._text.endswith(here[1]):
            return None
        headers, plain = [prompt[1]], {"role": "assistant", "content": self._varied.sentinel(turn, 1)}
        both = self._varied.render([*earlier, plain, *self._messages[turn + 1 :]])
        left, right = self._varied.around(both, turn - 1), self._varied.around(both, turn)
        if both and left and right:
            header = both[len(both) - len(left[1]) : len(right[0])]
            headers += [header] if header and prompt[1].startswith(header) else []
        shared = self._snapped(here[1], self._snapped(prompt[1], common(prompt[1], here[1])))
        if shared and THOUGHT_MARKS.fullmatch(prompt[1][shared:]):
            headers.append(prompt[1][:shared])
        fits = [len(header) for header in headers if here[1].startswith(header)]
        return len(self._text) - len(here[1]) + fits[0] if fits else None

    def _after_header(self, before: str) -> int | None:
        """Return where the generation prompt ends in a text, if only marks of thoughts follow in either."""
        header = self._varied.header()
        for end in range(len(header), 0, -1):
            at = before.rfind(header[:end])
            rests = header[end:], before[at + end :]
            if at >= 0 and all(THOUGHT_MARKS.fullmatch(rest) for rest in rests):
                return at + end
        return None

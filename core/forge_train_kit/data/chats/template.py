"""A chat template: Jinja, as Hugging Face's folders have it, rendered in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train.base.errors import describe, nearest

from .records import REASONING

if TYPE_CHECKING:
    from jinja2 import Template as Compiled

Span = tuple[int, int]


class Template:
    """Renders messages as the text that a model was made for, like transformers' `apply_chat_template`.

    Args:
        sources: Jinja, or several by name: `default` is used, or `tool_use` for a conversation with tools.
        name: for messages.
        variables: values for the template besides messages and tools: `bos_token`, …
        options: the template's own, such as `enable_thinking`; they become part of the sources, so that a copy has them
            too.
        tokens: the tokenizer's added tokens, such as `<|im_end|>`: they show where a turn ends.
        now: the time of `strftime_now`; None is the time of this call. Pass a fixed one to make a run repeatable.

    Raises:
        ConfigError: if jinja2 is missing, a source is not a template, or none reads an option.
    """

    def __init__(
        self,
        sources: Mapping[str, str] | str,
        *,
        name: str = "the chat template",
        variables: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        tokens: Sequence[str] = (),
        now: datetime.datetime | None = None,
    ) -> None:
        self.name = name
        self.variables = dict(variables or {})
        self.tokens = tuple(dict.fromkeys(token for token in tokens if token.strip()))
        self._tracker = _Tracker(now or datetime.datetime.now().astimezone())
        named = {"default": sources} if isinstance(sources, str) else sources
        self._check_options(named, options or {})
        self.sources = {key: _defaults(options or {}) + source for key, source in named.items()}
        self._compiled = {key: self._compile(source) for key, source in self.sources.items()}
        self._parts = False
        self._parts = self._takes_parts_alone()

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), *, generation_prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        """The text, and what of it lies inside `{% generation %}`; None where the template has no such tag.

        Args:
            messages: of plain JSON types.
            tools: JSON schemas.
            generation_prompt: whether the text ends with the header of the assistant's next turn.

        Raises:
            ConfigError: the template fails, or refuses the conversation by `raise_exception`.
        """
        key = "tool_use" if tools and "tool_use" in self._compiled else "default"
        if key not in self._compiled:
            raise ConfigError(f"{self.name}: none of its templates is the default: {', '.join(self._compiled)}.")
        template, tagged = self._compiled[key]
        values = {
            **self.variables,
            "messages": [_aliased(message, parts=self._parts) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
        }
        try:
            text, spans = self._tracker.run(template, values)
        except Exception as error:  # a stranger's program raises anything
            raise ConfigError(f"{self.name}: {getattr(error, 'message', None) or describe(error)}") from error
        if any(text[start : start + len(inner)] != inner for start, inner in spans):
            raise ConfigError(f"{self.name}: {{% generation %}} inside a macro or a set block can't be followed.")
        return text, [(start, start + len(inner)) for start, inner in spans if inner] if tagged else None

    def _check_options(self, sources: Mapping[str, str], options: Mapping[str, Any]) -> None:
        """Refuse an option that no source reads."""
        if not options:
            return
        from jinja2 import TemplateError, meta

        try:
            parsed = [self._tracker.environment.parse(source) for source in sources.values()]
        except TemplateError as error:
            raise ConfigError(f"{self.name} is no Jinja template: {describe(error)}") from error
        known = set[str]().union(*map(meta.find_undeclared_variables, parsed)) - _GIVEN
        for name in options:
            if name not in known:
                there = f"it reads {', '.join(sorted(known))}" if known else "it has no options"
                raise ConfigError(f"{self.name} reads no option {name!r}; {there}.{nearest(name, sorted(known))}")

    def _takes_parts_alone(self) -> bool:
        """Return True if the template writes a message's text only when its content is a list of parts."""
        probe = [{"role": "user", "content": "Sentinel"}]
        found = []
        for self._parts in (False, True):
            try:
                found.append("Sentinel" in self.render(probe)[0])
            except ConfigError:
                found.append(False)
        return found == [False, True]

    def _compile(self, source: str) -> tuple[Compiled, bool]:
        """The template, and whether it has `{% generation %}`."""
        self._tracker.tagged = False
        try:
            return self._tracker.environment.from_string(source), self._tracker.tagged
        except Exception as error:  # what is wrong in it may be anything, recursion that is too deep among it
            raise ConfigError(f"{self.name} is no Jinja template: {describe(error)}") from error


class _Tracker:
    """A sandboxed environment with what chat templates expect of transformers', and where `{% generation %}` stood."""

    def __init__(self, now: datetime.datetime) -> None:
        try:
            from jinja2 import TemplateError, ext, nodes
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ConfigError("chat templates need jinja2: pip install 'forge-train[data]'.") from error
        tracker = self

        class Generation(ext.Extension):
            tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance's)

            def parse(self, parser: Any) -> nodes.Node:
                tracker.tagged = True
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

            def _mark(self, caller: Any) -> str:
                inner: str = caller()
                tracker._spans.append((sum(map(len, tracker._pieces)), inner))
                return inner

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        self.tagged = False
        self._pieces: list[str] = []
        self._spans: list[tuple[int, str]] = []
        self.environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
        )
        self.environment.filters["tojson"] = _tojson
        self.environment.globals.update(raise_exception=raise_exception, strftime_now=now.strftime)

    def run(self, template: Compiled, values: Mapping[str, Any]) -> tuple[str, list[tuple[int, str]]]:
        """The text, and start and text of each `{% generation %}`."""
        self._pieces, self._spans = [], []
        for piece in template.generate(**values):
            self._pieces.append(piece)  # piece by piece: a tag asks how long the text is so far
        return "".join(self._pieces), self._spans


_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"} | {
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}
"""Variables that every template is given, and which are not options."""


def _defaults(options: Mapping[str, Any]) -> str:
    """Jinja that sets options unless they are given."""
    return "".join(
        f"{{%- if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif -%}}\n"
        for name, value in options.items()
    )


def _literal(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _aliased(message: Mapping[str, Any], *, parts: bool) -> dict[str, Any]:
    """The message with its thoughts under the names that templates read, as transformers gives them.

    Args:
        message: of a conversation.
        parts: whether its content becomes a list of one part.
    """
    if parts and isinstance(content := message.get("content"), str):
        message = {**message, "content": [{"type": "text", "text": content}]}
    thoughts = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return dict(message) if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}

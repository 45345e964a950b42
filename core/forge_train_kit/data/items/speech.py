"""Items of conversations: in lists of parts, as OpenAI has them, or beside messages with placeholders, as in LLaVA."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from forge_train import ConfigError
from forge_train.base.format import format_list

from ...modalities import Modality
from ..chats import Conversation, Template
from ..chats.calls import listed
from .weaver import Weaver

_SPOKEN = (
    *("system", "history", "messages", "conversations"),
    *("prompt", "completion", "instruction", "input", "output"),
)
"""Fields of what is said, in its order."""
_CONTENTS = ("content", "value")
_ENTRIES = ("url", "path", "bytes")
_PROBE = "Sentinel"


def written_by(template: Template, modalities: Mapping[str, Modality]) -> dict[str, str]:
    """The text that a template writes for an item of each modality in a list of parts: its placeholder, and what
    stands around it. It is the placeholder alone where the template takes no such parts."""
    return {name: _written_by(template, one) for name, one in modalities.items()}


def _written_by(template: Template, modality: Modality) -> str:
    part = {"type": "text", "text": _PROBE}
    try:
        plain, _ = template.render([{"role": "user", "content": [part]}])
        text, _ = template.render([{"role": "user", "content": [{"type": modality.name}, part]}])
    except ConfigError:
        return modality.placeholder
    at = next((at for at, (a, b) in enumerate(zip(plain, text, strict=False)) if a != b), len(plain))
    found = text[at : at + len(text) - len(plain)]
    if text != plain[:at] + found + plain[at:] or found.count(modality.placeholder) != 1:
        return modality.placeholder
    return found


class Speech:
    """A record whose items are replaced by the text that stands for them.

    Args:
        record: a conversation of any shape.
        weaver: of its file.
        written: modality → the text that stands for an item, with one placeholder.
        where: the record, for messages.

    Raises:
        ConfigError: there are not as many items as placeholders; or a part of a message is of no modality.
    """

    def __init__(self, record: Mapping[str, Any], weaver: Weaver, written: Mapping[str, str], where: str) -> None:
        self._weaver, self._written, self._where = weaver, written, where
        self._modalities = weaver.fields.modalities
        self._beside = weaver.fields.entries(record, where)
        self._left = {name: iter(entries) for name, entries in self._beside.items()}
        self._times = dict.fromkeys(self._modalities, 0)
        self._names = {
            text: name
            for name, one in self._modalities.items()
            for text in (f"<{name}>", one.placeholder, written[name])
        }
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._names, key=len, reverse=True))))
        self.entries: dict[str, list[Any]] = {name: [] for name in self._modalities}
        """The items of each modality, in the order of their placeholders."""
        of_items = {field for name in self._modalities for field in (name, f"{name}s")}
        self.record = {field: value for field, value in record.items() if field not in of_items}
        """The record without items."""
        for field in _SPOKEN:
            if self.record.get(field) is not None:
                self.record[field] = self._said(listed(self.record[field], where), f"{where}: {field}")
        weaver.fields.check_spelling(record, self.entries, where)
        if not self.record.keys() & {*_SPOKEN}:
            return  # refused by whoever reads conversations, with the fields that it reads
        for name, entries in self._beside.items():
            if self._times[name] != len(entries):
                raise weaver.miscounted(name, self._times[name], len(entries), where)

    def of(self, conversation: Conversation) -> dict[str, list[Any]]:
        """The items of the first messages, which are all of a conversation."""
        texts = [text for one in conversation.messages if isinstance(text := one.get("content"), str)]
        return {
            name: entries[: sum(text.count(self._modalities[name].placeholder) for text in texts)]
            for name, entries in self.entries.items()
        }

    def _said(self, value: Any, where: str) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._placed, value)
        if isinstance(value, list):
            return [self._said_by(one, f"{where}[{at}]") for at, one in enumerate(value)]
        return value

    def _said_by(self, message: Any, where: str) -> Any:
        if not isinstance(message, Mapping):
            return self._said(message, where)
        found = dict(message)
        for key in _CONTENTS:
            content = found.get(key)
            if isinstance(content, list):
                found[key] = "".join(self._parts(content, where))
            elif isinstance(content, str):
                found[key] = self._said(content, where)
        return found

    def _parts(self, parts: list[Any], where: str) -> Iterator[str]:
        for part in parts:
            kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
            if kind == "text" and isinstance(part.get("text"), str):
                yield self._said(part["text"], where)
                continue
            name = next((one for one in self._modalities if kind in (one, f"{one}_url", f"input_{one}")), None)
            if name is None:
                raise ConfigError(
                    f"{where}: content has a part of type {kind!r}; this run reads text and "
                    f"{format_list(map(repr, self._modalities))}."
                )
            keys = (kind, name, f"{name}_url", *_ENTRIES)
            entry = next((part[key] for key in keys if part.get(key) is not None), None)
            self._take(name, part if entry is None and part.get("base64") else entry)
            yield self._written[name]

    def _placed(self, found: re.Match[str]) -> str:
        name = self._names[found.group()]
        self._take(name, None)
        return self._written[name]

    def _take(self, name: str, entry: Any) -> None:
        """Note the next item: one of its own, or the next one beside the messages."""
        if entry is None:
            self._times[name] += 1
            entry = next(self._left[name], None)
            if entry is None:
                return  # there are too few, which is told once all are counted
        self.entries[name].append(entry)

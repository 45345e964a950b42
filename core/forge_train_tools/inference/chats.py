"""Records that are chats, as the model's own chat template writes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forge_train import ConfigError, Job
from forge_train_kit import hookspecs, model_files
from forge_train_kit.data.chats import (
    Conversation,
    Segments,
    Template,
    advice,
    check_written,
    conversation,
    open_template,
    render,
    tokenise_ended,
    turn_end,
)
from forge_train_kit.data.chats.calls import tools_of
from forge_train_kit.data.chats.records import check_beside, messages_of, with_system
from forge_train_kit.data.formats import utf8
from forge_train_kit.data.items import ItemPrompts
from forge_train_kit.data.items.speech import written_by
from forge_train_kit.data.prepare.encoding import TODAY
from forge_train_kit.tokenizer import Tokenizer

FIELDS = ("messages", "conversations")
_OF_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json", "special_tokens_map.json")


def is_chat(record: Mapping[str, Any]) -> bool:
    """True if a record holds messages."""
    return any(record.get(name) is not None for name in FIELDS) or isinstance(record.get("prompt"), list)


class Chats:
    """Renders chats, and finds the tokens of each that training would learn.

    Args:
        job: with the model's tokenizer.
        path: a checkpoint or a folder, which may hold the tokenizer's files.
        choice: another template than the model's: `chatml`, `llama3`, `plain` or a file.
    """

    def __init__(self, job: Job, path: Path, choice: str = "") -> None:
        self._job, self._choice = job, choice
        self.used = False
        """True if a chat was rendered."""
        self._written: dict[str, str] | None = None
        """Modality → the text that the template writes for an item."""
        self._files = model_files.of(job.config, job.hooks, path)

    @property
    def digest(self) -> str:
        """Of all that decides how a chat is written.

        Raises:
            ConfigError: the template that was chosen can't be.
        """
        found = hashlib.sha256()
        if self._choice:
            chosen = (sorted(self._template.sources.items()), sorted(self._template.variables.items()))
            found.update(repr(chosen).encode())
        for name, file in sorted(self._files.items()):
            if name in _OF_TEMPLATES or Path(name).match(model_files.TEMPLATES):
                found.update(name.encode() + file.read_bytes())
        return found.hexdigest()

    def with_items(
        self, record: Mapping[str, Any], items: ItemPrompts, where: str
    ) -> tuple[Mapping[str, Any], Mapping[str, list[Any]]]:
        """A chat with placeholders for its items, and these, by modality.

        Raises:
            ConfigError: there are not as many items as placeholders; or a part of a message is of no modality.
        """
        if self._written is None:
            self._written = written_by(self._template, items.fields.modalities)
        found = items.speech(record, self._written, where)
        return found.record, found.entries

    def encoded(
        self, record: Mapping[str, Any], where: str, tokenizer: Tokenizer, *, scored: bool
    ) -> tuple[str, list[int], tuple[tuple[int, int], ...]]:
        """The text of a chat, its tokens, and the spans of those that are learned.

        Args:
            record: with messages.
            where: its place, for messages.
            tokenizer: of the text.
            scored: whether something has to be learned; otherwise nothing is.

        Raises:
            ConfigError: the record is no chat, or the template can't write it.
        """
        self.used = True
        if scored:
            found = conversation(record, where)
            segments = render(self._template, found)
        else:
            found = _unscored(record, where)
            segments = self._unlearned(found)
        check_written(self._template, found, segments.text)
        utf8(segments.text, where)
        ids, learned = tokenise_ended(tokenizer, self._template, segments, self._ends)
        borders = (
            np.flatnonzero(np.diff(np.concatenate(([0], learned[1:] > 0, [0])))) + 1
        )  # no token precedes the first
        return segments.text, ids.tolist(), tuple(zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True))

    @cached_property
    def _template(self) -> Template:
        name = model_files.vocabulary_of(self._files)
        if not name and not self._choice:
            raise ConfigError(
                "--template: a record is a chat, but this model came without a tokenizer's folder, so it has no chat "
                f"template; {advice(self._job.config)}, or write the chats as texts."
            )
        try:
            return open_template(self._choice, self._files[name].parent if name else None, now=TODAY)
        except ConfigError as error:
            chat = "" if self._choice else "a record is a chat, but "
            raise ConfigError(f"--template: {chat}{error}") from error

    @cached_property
    def _ends(self) -> frozenset[int]:
        tokenizer = hookspecs.tokenizer(self._job)
        ends = {*tokenizer.stops, turn_end(self._template, tokenizer)}
        return frozenset(one for one in ends if one is not None)

    def _unlearned(self, found: Conversation) -> Segments:
        try:
            return Segments(self._template.render(found.messages, found.tools)[0], ())
        except ConfigError as error:
            raise ConfigError(f"{found.where}: {error}") from error


def _unscored(record: Mapping[str, Any], where: str) -> Conversation:
    """Messages that need none of the assistant."""
    fields = {name: value for name, value in record.items() if value is not None}
    name = next((name for name in FIELDS if name in fields), "")
    if not name:
        return conversation(record, where)
    check_beside(fields, where)
    messages = with_system(fields, messages_of(fields[name], f"{where}: {name}"), where)
    if not messages:
        raise ConfigError(f"{where}: the conversation is empty.")
    return Conversation(tuple(messages), tools_of(fields.get("tools"), where), where=where)

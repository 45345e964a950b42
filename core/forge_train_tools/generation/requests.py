"""Requests: records with a prompt or a chat, as the tokens that a model continues."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from forge_train.base.errors import ConfigError, nearest
from forge_train_kit.data.formats import utf8
from forge_train_kit.data.items import ItemPrompts, PromptItems
from forge_train_kit.tokenizer import Tokenizer

from ..inference.encoding import ID
from ..inference.records import Records
from .chats import ChatPrompts, question, shorter
from .rows import encode
from .sampling import Sampling

KEY = "--from-file"
PROMPT, MESSAGES, OWN = "prompt", "messages", "sampling"
SEED, STOP = "seed", "stop"
Long = Literal["refuse", "left"]
_USUAL = Sampling()
_OPTIONS = [field.name for field in fields(Sampling) if field.name not in ("drafts", "lookup")]
_BESIDE = {
    **dict.fromkeys(_OPTIONS, f"put it into {OWN!r}"),
    **dict.fromkeys(("max_tokens", "max_new_tokens"), f"put 'tokens' into {OWN!r}"),
    "do_sample": f"put 'temperature' into {OWN!r}",
    "n": "ask for several answers with --samples",
}
"""Fields that a user may take for options beside a prompt, and what to do: they would change nothing."""
_OF_CHATS = ("system", "tools")
ITEMS = ("images", "image", "videos", "video", "audios", "audio")
"""Fields of records that a user expects a model to see or to hear."""
_Encoded = tuple[list[int], "PromptItems | None"]
"""Tokens of a prompt, and its items."""


@dataclass(frozen=True)
class Request:
    """A record as the model reads it."""

    number: int
    """Its place among all records, from 0."""
    id: Any
    """Its value under `id`; None without."""
    ids: tuple[int, ...]
    cut: int
    """Number of tokens that were left out on the left."""
    sampling: Sampling
    draw: int
    """The number that it is known by to the draws."""
    chat: bool
    items: PromptItems | None = None
    """Images and the like among the tokens."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Records of files, or of the command line, and how they become tokens.

    Args:
        given: prompts, or records with one.
        files: files, folders, patterns or addresses of records.
        field: of the prompt; empty for `messages` if a record has it, and `prompt` if not.
        chat: whether prompts are messages of a user.
        long: treatment of prompts that leave no room for an answer.
        sampling: of records that say nothing else.
        longest: tokens that the model reads at once; None for any number.
        tokenizer: of the model.
        chats: opens its chat template, once one is needed.
        items: encodes prompts with items; None if the model takes text alone.
    """

    given: Sequence[str | Mapping[str, Any]]
    files: tuple[str, ...]
    field: str
    chat: bool
    long: Long
    sampling: Sampling
    longest: int | None
    tokenizer: Tokenizer
    chats: Callable[[], ChatPrompts]
    items: ItemPrompts | None = None

    @property
    def digest(self) -> str:
        """Of all records."""
        return self._records.digest if self.files else hashlib.sha256(repr(self.given).encode()).hexdigest()

    @property
    def _records(self) -> Records:
        return Records(self.files, KEY)

    def read(self, start: int = 0) -> Iterator[tuple[int, str, Mapping[str, Any], str]]:
        """Yield number, place and content of each record from number `start` on, and the folder of its paths.

        Raises:
            ConfigError: naming the file and the place of what can't be read.
        """
        if self.files:
            yield from self._records.read(start)
            return
        for number, one in enumerate(self.given[start:], start):
            where = "The prompt" if len(self.given) == 1 else f"Prompt {number + 1}"
            yield number, where, ({self.field or PROMPT: one} if isinstance(one, str) else one), str(Path.cwd())

    def check(self) -> tuple[int, bool]:
        """Look at every record, as `request` does; gives their number, and whether one is a chat.

        Raises:
            ConfigError: there is none, or as `request` does.
        """
        count, chat = 0, False
        for one in self.read():
            chat |= self.request(*one).chat
            count += 1
        if not count:
            raise ConfigError(f"{KEY}: {', '.join(self.files)} has no record.")
        return count, chat

    def request(self, number: int, where: str, record: Mapping[str, Any], folder: str) -> Request:
        """A record as tokens.

        Raises:
            ConfigError: it has no prompt, an option that is none or out of range, or is too long.
        """
        sampling, cut = self._sampling(record, where), 0
        chat = self.chat or (not self.field and record.get(MESSAGES) is not None)
        versions = self._versions(record, where, folder, chat=chat)
        ids, items = next(versions)
        if self.longest is not None and len(ids) >= self.longest:
            if self.long == "refuse":
                raise ConfigError(
                    f"{where}: has {len(ids):,} tokens, and the model reads {self.longest:,} at once, with what it "
                    "generates. Shorten it, or cut such prompts on their left: --long left."
                )
            if items and items.placed and not chat:
                raise ConfigError(
                    f"{where}: is too long, and a prompt with images or other items is not cut; shorten it."
                )
            before = len(ids)
            ids, items = self._cut(ids, versions, self.longest - sampling.tokens, where, chat=chat)
            cut = before - len(ids)
        draw = 0 if SEED in (record.get(OWN) or ()) else number
        return Request(number, record.get(ID), tuple(ids), cut, sampling, draw, chat, items)

    def _versions(self, record: Mapping[str, Any], where: str, folder: str, *, chat: bool) -> Iterator[_Encoded]:
        """The tokens of the prompt; of a chat, then without its oldest turns."""
        entries = self._entries(record, where)
        if not chat:
            if unread := next((name for name in _OF_CHATS if name != self.field and record.get(name)), None):
                raise ConfigError(
                    f"{where}: {unread!r} beside the prompt is read of chats only; add --chat, or give it another name."
                )
            text = self._placed(_text(record, self.field, where), entries)
            yield self._encoded(text, entries, where, folder, whole=False)
            return
        record = {name: value for name, value in record.items() if name.removesuffix("s") not in entries}
        if self.field or record.get(MESSAGES) is None:
            said = {"role": "user", "content": self._placed(_text(record, self.field, where), entries)}
            others = {name: value for name, value in record.items() if name != (self.field or PROMPT)}
            record = {**others, MESSAGES: [said]}
        elif record.get(PROMPT) is not None:
            raise ConfigError(f"{where}: has both a prompt and messages; keep one.")
        messages, tools = question(record, where)
        for found in shorter(messages):
            try:
                text = self.chats().render(found, tools)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
            yield self._encoded(text, self.items.last(text, entries) if self.items else {}, where, folder, whole=True)

    def _entries(self, record: Mapping[str, Any], where: str) -> dict[str, list[Any]]:
        """The items of a record, by modality.

        Raises:
            ConfigError: there are some, and the model takes text alone.
        """
        if self.items is not None:
            found = self.items.fields.entries(record, where)
            self.items.fields.check_spelling(record, found, where)
            return found
        if self.chat or self.field or record.get(MESSAGES) is None:
            for name in ITEMS:
                if record.get(name):
                    raise ConfigError(f"{where}: {name!r} is not read: this model takes text alone.")
        return {}

    def _placed(self, text: str, entries: Mapping[str, list[Any]]) -> str:
        return text if self.items is None else self.items.with_placeholders(text, entries)

    def _encoded(
        self, text: str, entries: Mapping[str, list[Any]], where: str, folder: str, *, whole: bool
    ) -> _Encoded:
        try:
            if self.items is None:
                return encode(self.tokenizer, text, whole=whole), None
            return self.items.place(encode(self.items.tokenizer, text, whole=whole), entries, where, folder)
        except ConfigError as error:
            told = str(error)
            raise ConfigError(told if told.startswith(where) else f"{where}: {told}") from error

    def _cut(self, ids: list[int], shorter: Iterator[_Encoded], most: int, where: str, *, chat: bool) -> _Encoded:
        """The prompt's last tokens, after the tokenizer's beginning; of a chat, its last turns."""
        begin, items = len(self.tokenizer.begin), None
        if chat:
            ids, items = next((one for one in shorter if len(one[0]) <= most), ([], None))
        elif most > begin:
            ids = [*ids[:begin], *ids[begin - most :]]
        else:
            ids = []
        if not ids:
            part = "even its last turn" if chat else "any part of it"
            raise ConfigError(
                f"{where}: is too long, and {part} leaves no room for the tokens to generate: the model reads "
                f"{self.longest:,} at once. Ask for fewer: --tokens."
            )
        return ids, items

    def _sampling(self, record: Mapping[str, Any], where: str) -> Sampling:
        if beside := [name for name in _BESIDE if name != self.field and record.get(name) is not None]:
            raise ConfigError(
                f"{where}: {beside[0]!r} beside the prompt is not read; {_BESIDE[beside[0]]}, or give it another name."
            )
        if (own := record.get(OWN)) is None:
            return self.sampling
        if not isinstance(own, Mapping):
            raise ConfigError(f"{where}: {OWN}: expected an object, found {type(own).__name__}.")
        if unknown := next((name for name in own if name not in _OPTIONS), None):
            raise ConfigError(
                f"{where}: {OWN}: there is no option {unknown!r}; there are {', '.join(_OPTIONS)}."
                f"{nearest(unknown, _OPTIONS)}"
            )
        try:
            return replace(self.sampling, **{name: _typed(name, value) for name, value in own.items()})
        except ConfigError as error:
            raise ConfigError("\n".join(f"{where}: {OWN}: {line}" for line in str(error).splitlines())) from error


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    if not isinstance(text := record.get(field or PROMPT), str):
        there = ", ".join(map(repr, record)) or "none"
        other = "" if field else ", or messages"
        raise ConfigError(
            f"{where}: expected a text under {field or PROMPT!r} (--field){other}; the fields are {there}."
        )
    utf8(text, f"{where}: {field or PROMPT!r}")
    return text


def _typed(name: str, value: Any) -> Any:
    """A value of JSON as the option's type."""
    if name == STOP:
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return tuple(value)
        raise ConfigError(f"{name}: expected a text or a list of texts, found {value!r}.")
    if isinstance(getattr(_USUAL, name), int) and type(value) is not int:
        raise ConfigError(f"{name}: expected a whole number, found {value!r}.")
    if type(value) not in (int, float):
        raise ConfigError(f"{name}: expected a number, found {value!r}.")
    return value

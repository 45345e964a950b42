"""The records of a forward-only job as tokens, in the order of the files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from forge_train.base.errors import ConfigError
from forge_train_kit.data.files import File, find
from forge_train_kit.data.formats import END, Part, lookup, utf8
from forge_train_kit.tokenizer import Tokenizer

KEY = "--data"
PROMPT, COMPLETION, ID = "prompt", "completion", "id"
Long = Literal["refuse", "left"]
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Tokens:
    """A record as the model reads it."""

    number: int
    """Its place among all records, from 0."""
    id: Any
    """Its value under `id`; None without."""
    ids: tuple[int, ...]
    """At least one."""
    given: int
    """Number of tokens at the beginning whose probability is not asked for, at least one."""
    cut: int
    """Number of tokens that were left out on the left."""


@dataclass(frozen=True)
class Records:
    """Texts, or prompts with a completion, of any files that Forge reads as training data.

    A completion's tokens are those of the whole text after the prompt's; white space at the end of a prompt belongs to
    the completion, as in lm-evaluation-harness. A text has the tokenizer's beginning before it, and nothing else.

    Args:
        sources: files, folders, patterns or addresses.
        field: of the text; empty for `text`, or `prompt` and `completion`.
        longest: tokens that the model reads at once.
        long: treatment of longer records: refused, or cut on their left.
        scored: whether the probability of tokens is asked for.
    """

    sources: Sequence[str]
    field: str
    longest: int
    long: Long
    scored: bool = True

    @property
    def files(self) -> list[File]:
        """The files behind the sources.

        Raises:
            ConfigError: there are none, or of several kinds.
        """
        return find(list(self.sources), key=KEY)

    @property
    def digest(self) -> str:
        """Of the content of all files, and of what is read of it."""
        found = hashlib.blake2b(repr((self.field, self.longest, self.long)).encode(), digest_size=16)
        for file in self.files:
            found.update(repr((file.suffix, file.packed)).encode())
            with file.open() as stream:
                while block := stream.read(_BLOCK):
                    found.update(block)
        return found.hexdigest()

    def read(self, start: int = 0) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        """Yield number, place and content of each record from number `start` on.

        Raises:
            ConfigError: naming the file and the place of what can't be read.
        """
        return islice(self._all(), start, None)

    def _all(self) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        number = 0
        for file in self.files:
            form = lookup(file.suffix, file.label)
            for place, record in form.read(file, whole(form.parts(file))):
                yield number, file.at(place), record
                number += 1

    def check(self, tokenizer: Tokenizer) -> int:
        """Look at every record, as `encoded` does; gives their number.

        Raises:
            ConfigError: there is none, or as `encoded` does.
        """
        count = 0
        for one in self.read():
            self.encoded(*one, tokenizer)
            count += 1
        if not count:
            raise ConfigError(f"{KEY}: {', '.join(self.sources)} has no record.")
        return count

    def encoded(self, number: int, where: str, record: Mapping[str, Any], tokenizer: Tokenizer) -> Tokens:
        """A record as tokens.

        Raises:
            ConfigError: it lacks the field, has no token to ask for, or is too long.
        """
        name = self.field or ("text" if PROMPT not in record else "")
        if name:
            before, text = "", _string(record, name, where)
        else:
            before, text = _string(record, PROMPT, where), _string(record, COMPLETION, where)
            kept = before.rstrip()
            before, text = kept, before[len(kept) :] + text
        whole, begin = tokenizer.encode(before + text), list(tokenizer.begin)
        if begin and whole[: len(begin)] == begin:  # as templates write it
            begin = []
        elif not (name or before or begin) and tokenizer.end is not None:
            begin = [tokenizer.end]  # as for text that is generated without a prompt
        given = len(tokenizer.encode(before)) if before else 0
        ids, given = [*begin, *whole], max(len(begin) + given, 1)  # nothing precedes the very first token
        if len(ids) < 1 + self.scored or (self.scored and len(ids) <= given):
            raise ConfigError(f"{where}: has no token that could be asked for; leave it out.")
        if (cut := max(len(ids) - self.longest, 0)) and self.long == "refuse":
            raise ConfigError(
                f"{where}: has {len(ids):,} tokens, and the model reads {self.longest:,} at once. Shorten it, or cut "
                "such records on their left: --long left."
            )
        if name and cut:
            given = cut + 1  # of a text, what is left is asked for
        if cut >= given:
            raise ConfigError(
                f"{where}: what is asked for has {len(ids) - given:,} tokens, and the model reads {self.longest:,} at "
                "once, one of them before it. Split the record."
            )
        return Tokens(number, record.get(ID), tuple(ids[cut:]), given - cut, cut)


def whole(parts: Sequence[Part]) -> Part:
    """All parts of a file as one."""
    return Part(parts[0].start, parts[-1].stop, sum(part.bytes for part in parts)) if parts else Part(0, END, 0)


def _string(record: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(text := record.get(name), str):
        there = ", ".join(map(repr, record)) or "none"
        raise ConfigError(f"{where}: expected a text under {name!r} (--field); the fields are {there}.")
    utf8(text, f"{where}: {name!r}")
    return text

"""Request for a preparation, and the division of its reading into tasks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from forge_train import ConfigError

from ..chats import Learn
from ..files import File
from ..formats import Part, lookup
from ..held_out import FEW
from ..items import ItemFields
from ..labels import Labels

TASK = 64 << 20
"""Bytes of a task at most, about: what a kill costs each worker, and the text of a shard."""
TASKS, LEAST = 64, 4 << 20
"""Smallest number of tasks, so that all cores have work, and the bytes below which no task is divided."""
TEXT = frozenset({"txt", "md", "rst", "py"})
"""Suffixes of files that are one document each."""
RULES = 8
"""Number of the rules by which conversations become tokens; tokens of other rules are not used again."""


@dataclass(frozen=True)
class Preparation:
    """Request for `forge data prepare`.

    Args:
        sources: files, folders, patterns or addresses.
        out: the folder to make.
        tokenizer: `bytes`, a `tokenizer.json` or a folder.
        train_tokenizer: number of ids of a tokenizer to train on the text; 0 to use `tokenizer`.
        field: the field of a record that holds its text.
        fields: exceptions for some files: a pattern of their names or addresses, and the field.
        held_out: share of the documents kept for evaluation.
        workers: number of processes.
        skip: whether to leave out and count a file that can't be read, instead of ending the preparation.
        chat: whether records are conversations, rendered by a chat template, rather than texts.
        template: the chat template; empty for the tokenizer's own.
        template_options: of that template.
        rename, roles: see `chats.renamed`.
        learn: the part of a conversation that is learned.
        learn_pattern: of that part, only the matches of this regular expression are learned; empty for all.
        each_turn: whether each turn of the assistant is a document of its own, which ends with it.
        split_special_tokens: whether special tokens in messages and tools stay text.
        pairs: whether records are pairs, each of which becomes two consecutive documents: preferences, which are
            conversations too, or texts.
        feedback: whether each record also has a label, true or false; it becomes a document of one token after the
            answer's.
        maps: changes of texts, in order, as `Maps` takes them.
        labels: fields of texts and labels, if records have labels; each record becomes two documents, of tokens and of
            classes.
        items: fields of items beside text, if records have them; each record becomes two documents, of tokens and of a
            table of its items.
        section: of the plugin whose options these are, for messages; empty for a command's.
    """

    sources: tuple[str, ...]
    out: Path
    tokenizer: str = "bytes"
    train_tokenizer: int = 0
    field: str = "text"
    fields: tuple[tuple[str, str], ...] = ()
    held_out: float = 0.01
    workers: int = 1
    skip: bool = False
    chat: bool = False
    template: str = ""
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    learn: Learn = "assistant"
    learn_pattern: str = ""
    each_turn: bool = False
    split_special_tokens: bool = False
    pairs: Literal["", "preference", "embedding"] = ""
    feedback: bool = False
    maps: tuple[str, ...] = ()
    labels: Labels | None = None
    items: ItemFields | None = None
    section: str = ""

    def key(self, option: str) -> str:
        """Return the name by which the user knows an option: `sft.each_turn`, or `--each-turn`."""
        return f"{self.section}.{option}" if self.section else f"--{option.replace('_', '-')}"

    def public(self) -> dict[str, Any]:
        """Return the settings that determine the result, besides the files and the tokenizer."""
        made: dict[str, Any] = {"held_out": self.held_out, "train_tokenizer": self.train_tokenizer}
        if self.items is not None:
            made |= self.items.public()
        if self.labels is not None:
            return {**made, **self.labels.public()}
        if self.pairs or self.chat:
            named: dict[str, Any] = {}
            if self.rename or self.roles:
                named = {"rename": dict(self.rename), "roles": dict(self.roles)}
            options = ("each_turn", "split_special_tokens", "learn_pattern", "feedback")
            named |= {key: value for key in options if (value := getattr(self, key))}
            chosen = {
                "template": self.template,
                "template_options": dict(self.template_options),
                "rules": RULES,
                **named,
            }
            return {**made, **chosen, **({"pairs": self.pairs} if self.pairs else {"learn": self.learn})}
        other = {"fields": [list(one) for one in self.fields]} if self.fields else {}
        return {**made, "field": self.field, **other, "maps": list(self.maps)}

    def field_of(self, file: File) -> str:
        """Return the field that holds the text in a file's records; the last matching pattern wins."""
        return next((name for one, name in reversed(self.fields) if matches(one, file)), self.field)

    def settings(self, files: Sequence[File]) -> str:
        """Return what a second run must have in common with the first to resume its work."""
        tokenizer = "" if self.train_tokenizer else str(self.tokenizer)
        stamps = [[file.address, *file.stamp()] for file in files]
        return json.dumps({**self.public(), "tokenizer": tokenizer, "skip": self.skip, "files": stamps}, indent=1)

    def whole(self, tasks: Sequence[Task]) -> bool:
        """Return True if documents are held out as a whole; False if there are only a few files."""
        files = {piece.file.address for task in tasks for piece in task.pieces}
        records = any(piece.file.suffix not in TEXT for task in tasks for piece in task.pieces)
        return records or len(files) * self.held_out >= FEW


def matches(pattern: str, file: File) -> bool:
    """Return True if a file's name or address matches a pattern with `*` and `?`."""
    return fnmatchcase(file.name, pattern) or fnmatchcase(file.address, pattern)


@dataclass(frozen=True)
class Piece:
    """A part of a file."""

    file: File
    part: Part


@dataclass(frozen=True)
class Task:
    """Pieces that one worker reads, and writes as one shard for each side."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.part.bytes for piece in self.pieces)


def divide(files: Sequence[File], unreadable: dict[str, str] | None = None) -> list[Task]:
    """Tasks of at most about `TASK` bytes, in the order of the files; they depend on names and sizes alone.

    Args:
        files: to be read.
        unreadable: is given the files that can't be, and why; without it the first one is an error.
    """
    pieces: list[Piece] = []
    for file in files:
        try:
            pieces += [Piece(file, part) for part in lookup(file.suffix, file.label).parts(file)]
        except ConfigError as error:
            if unreadable is None:
                raise
            unreadable[file.address] = str(error)
    wanted = min(TASK, max(sum(piece.part.bytes for piece in pieces) // TASKS, LEAST))
    tasks: list[Task] = []
    waiting: list[Piece] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += piece.part.bytes
        if size >= wanted:
            tasks.append(Task(len(tasks), tuple(waiting)))
            waiting, size = [], 0
    if waiting:
        tasks.append(Task(len(tasks), tuple(waiting)))
    return tasks

"""Prompts with items, as models read them."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import hookspecs
from ...enabled_modalities import enabled_modalities
from ...modalities import ItemSource
from ...stores.addresses import is_remote
from ..file import File
from .extras import RowItems
from .fields import ItemFields
from .kept import Kept
from .marks import MarkingTokenizer
from .notes import Noted, Table
from .rows import gathered
from .speech import Speech
from .weaver import Weaver

if TYPE_CHECKING:
    from forge_train import Job


@dataclass(frozen=True)
class PromptItems:
    """Items of a prompt, not decoded yet."""

    fields: ItemFields
    placed: tuple[tuple[ItemSource, Noted, int], ...] = ()
    """Each with its place, and its position in the prompt."""

    def read(self, length: int) -> dict[str, RowItems]:
        """Decode them, for a prompt of so many tokens.

        Raises:
            ConfigError: naming the item that can't be read.
        """
        return gathered(self.fields, self.placed, length)


class ItemPrompts:
    """Finds the items of prompts, and makes room for them among the tokens.

    Bytes in records are kept in a temporary file as long as this lives.

    Args:
        job: of the model.
    """

    def __init__(self, job: Job) -> None:
        self.fields = ItemFields(enabled_modalities(job), job.hooks.gives("fusion") == "token", "/")
        self.tokenizer = MarkingTokenizer(hookspecs.tokenizer(job), self.fields.modalities.values())
        """Gives a mark for each placeholder."""
        self._folder = tempfile.TemporaryDirectory(prefix="forge-items-")
        self._kept = Kept(Path(self._folder.name) / "prompts.items")

    def with_placeholders(self, text: str, entries: Mapping[str, Sequence[Any]]) -> str:
        """The text, after a placeholder for each item if it has none of that modality."""
        for name, some in entries.items():
            placeholder = self.fields.modalities[name].placeholder
            if placeholder not in text:
                text = placeholder * len(some) + text
        return text

    def speech(self, record: Mapping[str, Any], written: Mapping[str, str], where: str) -> Speech:
        """A chat whose items are replaced by placeholders.

        Args:
            record: of any shape.
            written: modality → the text that stands for an item (`written_by`).
            where: the record, for messages.

        Raises:
            ConfigError: there are not as many items as placeholders; or a part of a message is of no modality.
        """
        return Speech(record, Weaver(self.fields, self.tokenizer, File(where), self._kept), written, where)

    def place(
        self, marked: Sequence[int], entries: Mapping[str, Sequence[Any]], where: str, folder: str
    ) -> tuple[list[int], PromptItems]:
        """Token ids with room for the items.

        Args:
            marked: what the tokenizer here gives for the prompt.
            entries: its items, by modality, in the order of their placeholders.
            where: the prompt, for messages.
            folder: of relative paths.

        Raises:
            ConfigError: naming the prompt.
        """
        ids, learned = np.asarray(marked, np.uint32), np.zeros(len(marked), np.uint8)
        weaver = Weaver(replace(self.fields, folder=folder), self.tokenizer, File(where), self._kept)
        found = {
            name: [str(one) if isinstance(one, Path) else one for one in entries.get(name, ())]
            for name in self.fields.modalities
        }
        woven = weaver.woven(ids, learned, found, b"", where)
        placed = []
        for one in Table.of(woven.table[0]).items:
            path = f"/{one.path}" if one.path else self._kept.path_of_part()
            span = (0, None) if one.offset < 0 else (one.offset, one.size)
            placed.append((ItemSource(path, where, *span), one, one.start))
        return woven.tokens[0].tolist(), PromptItems(self.fields, tuple(placed))

    def none(self, length: int) -> dict[str, RowItems]:
        """The items of a text of so many tokens that has none."""
        return gathered(self.fields, (), length)

    def last(self, text: str, entries: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """The last items, as many as a text has placeholders: those of a chat without its oldest turns."""
        counts = {name: text.count(one.placeholder) for name, one in self.fields.modalities.items()}
        return {name: list(some)[max(len(some) - counts[name], 0) :] for name, some in entries.items()}


def in_folder(entry: Any, folder: str) -> Any:
    """Items of a record, one or a list, whose paths do not depend on the folder of its file."""
    if isinstance(entry, list):
        return [in_folder(one, folder) for one in entry]
    if isinstance(entry, Mapping):
        return {key: in_folder(one, folder) if key in ("path", "url") else one for key, one in entry.items()}
    relative = isinstance(entry, str) and entry and not entry.startswith(("/", "data:", "file://"))
    return posixpath.join(folder, entry) if relative and not is_remote(entry) else entry


def prompts_of(job: Job) -> ItemPrompts | None:
    """For a model that takes items; None for one of text alone.

    Raises:
        ConfigError: two plugins give one modality.
    """
    return ItemPrompts(job) if enabled_modalities(job) else None

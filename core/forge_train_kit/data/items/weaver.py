"""Texts and their items, woven into one document, with a table of the items after it."""

from __future__ import annotations

import itertools
import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError
from forge_train.base.errors import PluginError

from ...format import format_plural
from ...modalities import Grid, Item
from ..file import File
from ..shard import Ids, Learned
from .fields import BrokenItemError, ItemFields, called, short
from .kept import Kept
from .located import Located, located
from .marks import MarkingTokenizer
from .notes import Noted, Table


class Woven(NamedTuple):
    """A record with items."""

    tokens: tuple[Ids, Learned]
    """The document of its tokens, and what of it is learned."""
    table: tuple[Ids, Learned]
    key: bytes
    """Decides whether it is held out: its items if it has some, so that records of the same items are on one side."""


@dataclass(frozen=True)
class Weaver:
    """Makes the two documents of each record of a file: its tokens with room for its items, and their table.

    Args:
        fields: that hold the items.
        tokenizer: of the preparation.
        file: of the records.
        kept: takes items that are not in files of this machine.
        replaced: takes a sentence for each item that an empty one stands in for.
    """

    fields: ItemFields
    tokenizer: MarkingTokenizer
    file: File
    kept: Kept
    replaced: dict[str, str] = field(default_factory=dict)

    def text(self, record: Mapping[str, Any], text: str, where: str) -> Woven:
        """A text, all of which is learned.

        Raises:
            ConfigError: as `woven`; the text has no token.
        """
        tokenizer, entries = self.tokenizer, self.fields.entries(record, where)
        self.fields.check(record, text, where)
        self.fields.check_spelling(record, entries, where)
        ids = [*tokenizer.begin, *tokenizer.encode(self.fields.placed(text, entries))]
        if not ids:
            raise ConfigError(f"{where}: the text has no token.")
        ended = np.asarray([*ids, *([] if tokenizer.end is None else [tokenizer.end])], np.int64)
        return self.woven(ended, np.ones(len(ended), np.uint8), entries, text.encode(), where)

    def woven(self, ids: Ids, learned: Learned, entries: Mapping[str, list[Any]], text: bytes, where: str) -> Woven:
        """A record.

        Args:
            ids: with marks.
            learned: of each.
            entries: the record's items, by modality.
            text: of the record.
            where: the record, for messages.

        Raises:
            BrokenItemError: an item can't be read, naming the file and the place.
            ConfigError: there are not as many items as placeholders.
        """
        tokenizer = self.tokenizer
        marks = [(at, tokenizer.marks[int(ids[at])]) for at in np.flatnonzero(ids >= tokenizer.vocabulary).tolist()]
        for name, some in entries.items():
            if (there := sum(one == name for _, one in marks)) != len(some):
                raise self.miscounted(name, there, len(some), where)
        left = {name: iter(some) for name, some in entries.items()}
        pieces, masks, noted, keys = list[Ids](), list[Learned](), list[Noted](), list[str]()
        last = position = 0
        for at, name in marks:
            pieces.append(ids[last:at])
            masks.append(learned[last:at])
            position += at - last
            entry = next(left[name])
            try:
                found = located(entry, self.file, self.fields.folder, where, self.kept)
                one, texts = self._noted(name, found, position, where)
            except ConfigError as error:
                if self.fields.broken != "replace":
                    raise BrokenItemError(str(error)) from error
                self.replaced[str(error)] = str(error)
                one, texts = self._missing(name, position)
            keys.append(short(entry) if one.missing else self._key(found))
            pieces.append(self._written(one, texts))
            masks.append(np.zeros(one.length, learned.dtype))
            noted.append(one)
            position, last = position + one.length, at + 1
        place = where.removeprefix(self.file.label).removeprefix(", ")
        table = Table(self._relative(self.file.address), place, tuple(noted)).document()
        whole = np.concatenate([*pieces, ids[last:]]).astype(np.uint32)
        masked = np.concatenate([*masks, learned[last:]]), np.zeros(len(table), learned.dtype)
        return Woven((whole, masked[0]), (table, masked[1]), "\n".join(keys).encode() or text)

    def miscounted(self, name: str, there: int, items: int, where: str) -> ConfigError:
        """The error for a number of placeholders that is not that of the items."""
        placeholders = f"{format_plural(there, 'placeholder')} {self.fields.modalities[name].placeholder}"
        return ConfigError(
            f"{where}: the text has {placeholders} for {format_plural(items, name)}; write one for each."
        )

    def _noted(self, name: str, found: Located, position: int, where: str) -> tuple[Noted, list[Ids]]:
        """An item, and the tokens of the text before each of its groups."""
        modality, source = self.fields.modalities[name], found.source(where)
        texts = called(modality, "texts", source) if hasattr(modality, "texts") else ()
        among = hasattr(modality, "written") and not self.fields.alone
        written = called(modality, "written", source) if among else ""
        pace = float(called(modality, "pace", source)) if hasattr(modality, "pace") else 1.0
        if not self.fields.decoded:
            place = self._relative(found.path), found.offset, found.size, found.digest
            grid = called(modality, "measure", source)
            return self._placed(name, position, grid, place, texts, written=written, pace=pace)
        item: Item = called(modality, "read", source)
        if item.values.shape != (shape := (math.prod(item.grid), modality.features)):
            raise PluginError(f"Modality {name!r}: read gave {item.values.shape} values, and its grid says {shape}.")
        content = item.values.tobytes()
        at, digest = self.kept.add(content)
        place = "", at, len(content), digest
        return self._placed(name, position, item.grid, place, texts, item.values.dtype.str, written, pace)

    def _missing(self, name: str, position: int) -> tuple[Noted, list[Ids]]:
        """An empty item."""
        modality: Any = self.fields.modalities[name]
        return self._placed(name, position, modality.smallest(), ("", 0, 0, ""))

    def _placed(
        self,
        name: str,
        position: int,
        sizes: Grid,
        place: tuple[str, int, int, str],
        texts: Sequence[str] = (),
        dtype: str = "",
        written: str = "",
        pace: float = 1.0,
    ) -> tuple[Noted, list[Ids]]:
        modality = self.fields.modalities[name]
        texts = ["".join(texts)] if texts and self.fields.alone else texts  # before its one position
        grid: Grid = (int(sizes[0]), int(sizes[1]), int(sizes[2]))
        vectors, groups = int(modality.positions(grid)), max(1, len(texts))
        if grid[0] % groups or modality.positions((grid[0] // groups, *grid[1:])) * groups != vectors:
            raise PluginError(f"Modality {name!r}: {groups} texts do not divide an item with the grid {grid} evenly.")
        if written:
            ids = np.asarray(self.tokenizer.encode(written), np.uint32)
            runs = _runs(places := ids >= self.tokenizer.vocabulary)
            if (found := int(places.sum())) != vectors:
                raise PluginError(
                    f"Modality {name!r}: its text has {found} placeholders, and an item with the grid {grid} {vectors} "
                    "vectors."
                )
            return Noted(name, position, len(ids), vectors, grid, *place, (), dtype, runs, pace), [ids[~places]]
        before: list[Ids] = [np.asarray(self.tokenizer.encode(text), np.uint32) for text in texts]
        lead = tuple(map(len, before))
        length = sum(lead) + (1 if self.fields.alone else vectors)
        return Noted(name, position, length, vectors, grid, *place, lead, dtype, pace=pace), before

    def _written(self, one: Noted, texts: Sequence[Ids]) -> Ids:
        """The tokens at an item's positions."""
        found = np.full(one.length, self.tokenizer.fill[one.modality], np.uint32)
        if texts:
            found[one.places(0) < 0] = np.concatenate(texts)
        return found

    def _key(self, found: Located) -> str:
        """An item's part of the key by which its record is held out."""
        return f"{self._relative(found.path)}{found.digest}{found.offset if found.path and found.offset >= 0 else ''}"

    def _relative(self, path: str) -> str:
        """A path without the folder of all data files, which may move; an address as it is."""
        return posixpath.relpath(path, self.fields.root) if path.startswith("/") else path


def _runs(places: NDArray[np.bool_]) -> tuple[int, ...]:
    """Lengths of the stretches of False and True in turn, False first."""
    borders = np.flatnonzero(np.diff(places, prepend=False)).tolist()
    return tuple(stop - start for start, stop in itertools.pairwise([0, *borders, len(places)]))

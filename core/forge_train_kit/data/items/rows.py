"""Whole records with items in rows: items are decoded where their rows are read."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError
from forge_train.base.errors import describe

from ...modalities import Item, ItemSource, Modality
from ...stores.addresses import is_remote
from ..balance import Costs
from ..documents import Documents, Int64
from ..fit import Long, fitted
from ..held_out import Side
from ..rows import Arrays, PackedRows, Pieces
from .costs import ItemCosts
from .extras import RowItems
from .fields import ItemFields, called
from .kept import kept_path
from .notes import Noted, Table

LOOKED_AT = 100
"""Records among which `first_file` looks."""


class Records:
    """Prepared records: every other document is one's tokens, and the document after it the table of its items.

    Args:
        documents: those of a folder prepared with `ItemFields`.
        fields: of the preparation.
    """

    masked = True

    def __init__(self, documents: Documents, fields: ItemFields) -> None:
        self.count, self.digest, self.shards = documents.count // 2, documents.digest, documents.shards
        self.weighted = documents.weighted
        self.documents, self.fields = documents, fields

    @property
    def tokens(self) -> int:
        """Their number, tables left out."""
        return int(self.lengths().sum())

    def span(self, record: int) -> tuple[int, int]:
        return self.documents.span(2 * record)

    def learned(self, start: int, out: NDArray[np.bool_]) -> None:
        self.documents.learned(start, out)

    def lengths(self) -> Int64:
        return self.documents.lengths()[::2]

    def table(self, record: int) -> Table:
        """The items of a record."""
        begin, end = self.documents.span(2 * record + 1)
        document = np.zeros(end - begin, np.int64)
        self.documents.take(begin, document)
        return Table.of(document)

    def where(self, record: int) -> str:
        """The file and the place of a record."""
        return self._where(self.table(record))

    def source(self, record: int, table: Table, one: Noted) -> ItemSource:
        """The place of an item of a record."""
        if one.path:
            path = self._absolute(one.path)
        else:
            shard = self.documents.path_of(2 * record)
            path = str(kept_path(shard.parent, shard.stem.rpartition("-")[2]))
        whole = one.offset < 0
        return ItemSource(path, self._where(table), 0 if whole else one.offset, None if whole else one.size)

    def trimmed(self, record: int, start: int, length: int) -> tuple[int, int]:
        """A stretch of a record's tokens without the parts of items that its borders cut."""
        stop = start + length
        for one in self.table(record).items:
            end = one.start + one.length
            if one.start < start < end:
                start = end
            elif one.start < stop < end:
                stop = one.start
        return start, stop - start

    def fitted(self, sequence: int, *, long: Long, packing: str, key: str) -> Pieces:
        """Whole records in rows of `sequence` tokens; see `fitted`. An item that a cut would divide is left out.

        Raises:
            ConfigError: there is a longer record, and it is to be refused; or an item that no row can hold; or records
                are to be put into buckets.
        """
        if packing == "buckets":
            raise ConfigError(f"{key}.packing: 'buckets' does not count items; choose best_fit or pad.")
        self._check(sequence, long, key)
        documents: Any = self
        return fitted(documents, sequence, long=long, packing=packing, key=key, trimmed=self.trimmed)

    def _check(self, sequence: int, long: Long, key: str) -> None:
        lengths = self.lengths()
        longer = np.flatnonzero(lengths > sequence)
        if long == "refuse" and len(longer):
            longest = int(lengths.argmax())
            items = sum(one.length for one in self.table(longest).items)
            raise ConfigError(
                f"{key}.long: {len(longer):,} of {len(lengths):,} records are longer than a row of {sequence:,} "
                f"tokens; {self.where(longest)}, has {int(lengths[longest]):,}, {items:,} of them positions of items. "
                "Raise train.sequence, or choose drop, left or right."
            )
        for record in longer.tolist() if long != "drop" else ():
            for one in self.table(record).items:
                if one.length > sequence:
                    raise ConfigError(
                        f"{self.where(record)}: an item of {one.modality!r} takes {one.length:,} positions, and a row "
                        f"has {sequence:,} tokens (train.sequence); choose {key}.long = 'drop' to leave such records "
                        "out."
                    )

    def _where(self, table: Table) -> str:
        return f"{self._absolute(table.file)}, {table.place}" if table.place else self._absolute(table.file)

    def _absolute(self, path: str) -> str:
        return path if is_remote(path) else posixpath.normpath(posixpath.join(self.fields.root, path))


def first_file(sides: Mapping[Side, Any]) -> tuple[str, str] | None:
    """Modality and path of an item that is a file of its own, among the first held-out records or those of training."""
    for side in ("validation", "train"):
        records = sides[side]
        for record in range(min(records.count, LOOKED_AT)):
            table = records.table(record)
            for one in table.items:
                source = records.source(record, table, one)
                if source.size is None and Path(source.path).is_file():
                    return one.modality, source.path
    return None


def opened(sides: Mapping[Side, Documents], fields: ItemFields | None) -> Mapping[Side, Documents | Records]:
    """Both sides of a prepared folder: of records, if it has items."""
    return sides if fields is None else {side: Records(one, fields) for side, one in sides.items()}


class ItemRows(PackedRows):
    """Whole records in rows, with their items.

    Args:
        records: of one side.
        sequence: tokens in a row.
        pieces: what lies where; their documents are numbers of records.
        pad: the token id of padding.
    """

    def __init__(self, records: Records, sequence: int, pieces: Pieces, *, pad: int) -> None:
        super().__init__(records.documents, sequence, replace(pieces, document=pieces.document * 2), pad=pad)
        self._records, self._fields = records, records.fields
        self._costs = ItemCosts(records.fields.modalities)
        self.pieces = pieces

    def read(self, rows: Int64) -> Arrays:
        return replace(super().read(rows), items=tuple(self._items(row) for row in rows.tolist()))

    def where(self, row: int) -> str:
        return self._records.where(int(self.pieces.document[self.pieces.of(row).start]))

    def costs(self, rows: Int64) -> Costs:
        """Operations of encoding the items, from the tables: no item is read. See `ItemCosts`."""
        each = [sum(self._costs(one.modality, one.grid) for *_, one, _ in self._noted(row)) for row in rows.tolist()]
        return np.array(each, np.float64)

    def inside(self, row: int) -> Iterator[tuple[ItemSource, Noted, int]]:
        """The items of a row, each with its place and its position in the row."""
        for record, table, one, at in self._noted(row):
            yield self._records.source(record, table, one), one, at

    def _noted(self, row: int) -> Iterator[tuple[int, Table, Noted, int]]:
        """The items of a row, each with its record, the record's table, and its position in the row."""
        at = 0
        for piece in self.pieces.of(row):
            start, length = int(self.pieces.start[piece]), int(self.pieces.length[piece])
            record = int(self.pieces.document[piece])
            table = self._records.table(record)
            for one in table.items:
                if start <= one.start and one.start + one.length <= start + length:
                    yield record, table, one, at + one.start - start
            at += length

    def _items(self, row: int) -> Mapping[str, RowItems]:
        return gathered(self._fields, self.inside(row), self._sequence)


def gathered(fields: ItemFields, placed: Iterable[tuple[ItemSource, Noted, int]], sequence: int) -> dict[str, RowItems]:
    """Decode the items of a row, of all modalities.

    Args:
        fields: of the items.
        placed: each with its place, and its position in the row.
        sequence: tokens in the row.

    Raises:
        ConfigError: naming the item that can't be read.
    """
    values: dict[str, list[NDArray[Any]]] = {name: [] for name in fields.modalities}
    grids: dict[str, list[tuple[int, int, int]]] = {name: [] for name in fields.modalities}
    paces: dict[str, list[float]] = {name: [] for name in fields.modalities}
    vectors = dict.fromkeys(fields.modalities, 0)
    found = {name: RowItems.none(one.features, sequence) for name, one in fields.modalities.items()}
    replaced: dict[str, list[str]] = {name: [] for name in fields.modalities}
    for source, one, at in placed:
        try:
            values[one.modality].append(_decoded(fields.modalities[one.modality], source, one))
        except ConfigError as error:
            if fields.broken != "replace":
                raise
            values[one.modality].append(_empty(fields.modalities[one.modality], one))
            replaced[one.modality].append(str(error))
        first = len(grids[one.modality]) if fields.alone else vectors[one.modality]
        found[one.modality].places[at : at + one.length] = one.places(first)
        grids[one.modality] += [grid for *_, grid in one.stretches]
        paces[one.modality] += [one.pace] * len(one.stretches)
        vectors[one.modality] += one.vectors
    return {
        name: replace(
            empty,
            values=np.concatenate(values[name]),
            grids=np.array(grids[name], np.int64),
            paces=np.array(paces[name], np.float32),
            replaced=tuple(replaced[name]),
        )
        if values[name]
        else empty
        for name, empty in found.items()
    }


def _empty(modality: Modality, one: Noted) -> NDArray[Any]:
    """The values of an item that zeros stand in for."""
    return np.zeros((math.prod(one.grid), modality.features), np.uint8)


def _kept(modality: Modality, source: ItemSource, one: Noted) -> NDArray[Any]:
    """The values of an item that was decoded when its record was prepared."""
    try:
        with Path(source.path).open("rb") as file:
            file.seek(source.offset)
            values = np.frombuffer(file.read(one.size), one.dtype)
        return values.reshape(math.prod(one.grid), modality.features)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: {describe(error)}; delete its folder to prepare the data again.") from error


def _decoded(modality: Modality, source: ItemSource, one: Noted) -> NDArray[Any]:
    if one.missing:
        return _empty(modality, one)
    if one.dtype:
        return _kept(modality, source, one)
    item: Item = called(modality, "read", source)
    grid, shape = tuple(item.grid), (math.prod(one.grid), modality.features)
    if grid != one.grid or item.values.shape != shape:
        raise ConfigError(
            f"{source}: has a grid of {grid} and values of {list(item.values.shape)}, and the record was prepared "
            f"for {one.grid} and {list(shape)}: restore the file, or touch the data file to prepare it again."
        )
    if source.size is None and (size := Path(source.path).stat().st_size) != one.size:
        raise ConfigError(
            f"{source}: has {size:,} bytes, and had {one.size:,} when its record was prepared: restore the file, or "
            "touch the data file to prepare it again."
        )
    return item.values

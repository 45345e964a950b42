"""Records with items: turns their texts into tokens with room for the items, and notes where each item lies.

A prepared folder has two documents for each record: its tokens, and a table of its items as JSON, one token for each
byte.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError
from forge_train.base.errors import ForgeError, describe
from forge_train.base.format import format_list

from ...enabled_modalities import enabled_modalities
from ...modalities import Grid, ItemSource, Modality
from ..file import File
from ..files import find
from ..shard import Ids, Learned
from .extras import RowItems
from .kept import Kept
from .located import located
from .marks import MarkingTokenizer

if TYPE_CHECKING:
    from forge_train import Job


class Noted(NamedTuple):
    """An item of a prepared record, as its table has it."""

    modality: str
    start: int
    """First position in the document."""
    length: int
    """Positions in the document."""
    vectors: int
    grid: Grid
    path: str
    """Relative to the folder of all data files; empty for items that are kept beside the tokens."""
    offset: int
    size: int
    """Bytes of the item, from `offset` on; of a file that is an item as a whole, with an offset of −1."""


@dataclass(frozen=True)
class Table:
    """Items of a prepared record, and where that is from."""

    file: str
    """Relative to the folder of all data files; or an address."""
    place: str
    items: tuple[Noted, ...]

    def document(self) -> Ids:
        """The table as a document."""
        content = json.dumps([self.file, self.place, [list(one) for one in self.items]], separators=(",", ":"))
        return np.frombuffer(content.encode(), np.uint8).astype(np.uint32)

    @classmethod
    def of(cls, document: NDArray[Any]) -> Table:
        """Parse a document."""
        file, place, items = json.loads(document.astype(np.uint8).tobytes())
        return cls(file, place, tuple(Noted._make([*one[:4], tuple(one[4]), *one[5:]]) for one in items))


@dataclass(frozen=True)
class ItemFields:
    """The fields of records that hold their items.

    Args:
        modalities: of the run, by name.
        alone: whether an item takes one position, rather than one for each of its feature vectors.
        root: the folder of all data files.
    """

    modalities: Mapping[str, Modality]
    alone: bool
    root: str

    @classmethod
    def of(cls, job: Job, paths: str | tuple[str, ...], key: str) -> ItemFields:
        """The fields for the modalities of a run.

        Args:
            job: of the run.
            paths: the data files.
            key: the section that names them.

        Raises:
            ConfigError: no plugin gives a modality, or there are no such files.
        """
        modalities = enabled_modalities(job)
        if not modalities:
            raise ConfigError(f"{key}: no enabled plugin gives a modality, so records can have no items.")
        folders = [posixpath.dirname(file.address) for file in find(paths, key=f"{key}.path") if file.local]
        alone = job.hooks.gives("fusion") == "token"
        return cls(modalities, alone, posixpath.commonpath(folders) if folders else "/")

    def none(self, sequence: int) -> dict[str, RowItems]:
        """A row without items."""
        return {name: RowItems.none(one.features, sequence) for name, one in self.modalities.items()}

    def public(self) -> dict[str, Any]:
        """The settings that determine the result."""
        each = {name: {"placeholder": one.placeholder, **one.public()} for name, one in self.modalities.items()}
        return {"items": each, "alone": self.alone}

    def entries(self, record: Mapping[str, Any], text: str, where: str) -> dict[str, list[Any]]:
        """The items of a record as it has them, by modality: those under `images`, or the one under `image`.

        Raises:
            ConfigError: a field holds no list, or items of which the text has placeholders and the run no modality.
        """
        for field in record:
            name = field.removesuffix("s")
            if f"<{name}>" in text and name not in self.modalities and record[field]:
                raise ConfigError(
                    f"{where}: no enabled plugin gives a modality {name!r}, whose items are under {field!r}; there is "
                    f"{format_list(map(repr, self.modalities))}."
                )
        found: dict[str, list[Any]] = {}
        for name in self.modalities:
            several, one = record.get(f"{name}s"), record.get(name)
            if several is not None and not isinstance(several, list):
                raise ConfigError(f"{where}: {f'{name}s'!r}: expected a list of items, found {_short(several)}.")
            found[name] = [*(several or []), *([] if one is None else one if isinstance(one, list) else [one])]
        return found

    def woven(
        self,
        ids: Ids,
        learned: Learned,
        entries: Mapping[str, list[Any]],
        tokenizer: MarkingTokenizer,
        file: File,
        place: str,
        kept: Kept,
    ) -> list[tuple[Ids, Learned]]:
        """The two documents of a record, each with what of it is learned.

        Args:
            ids: with marks.
            learned: of each.
            entries: the record's items, by modality.
            tokenizer: which made the marks.
            file: of the record.
            place: in it.
            kept: takes items that are not in files of this machine.

        Raises:
            ConfigError: naming the file and the place.
        """
        where = file.at(place)
        marks = [(at, tokenizer.marks[int(ids[at])]) for at in np.flatnonzero(ids >= tokenizer.vocabulary).tolist()]
        for name, some in entries.items():
            if (there := sum(one == name for _, one in marks)) != len(some):
                placeholder = self.modalities[name].placeholder
                raise ConfigError(
                    f"{where}: the text has {placeholder} {_times(there)}, and the record {len(some)} "
                    f"{name if len(some) == 1 else f'{name}s'}; give one for each."
                )
        left = {name: iter(some) for name, some in entries.items()}
        pieces, masks, noted = list[Ids](), list[Learned](), list[Noted]()
        last = position = 0
        for at, name in marks:
            pieces.append(ids[last:at])
            masks.append(learned[last:at])
            position += at - last
            one = self._noted(name, next(left[name]), position, file, where, kept)
            pieces.append(np.full(one.length, tokenizer.fill[name], np.uint32))
            masks.append(np.zeros(one.length, learned.dtype))
            noted.append(one)
            position, last = position + one.length, at + 1
        table = Table(self._relative(file.address), place, tuple(noted)).document()
        whole = np.concatenate([*pieces, ids[last:]]).astype(np.uint32)
        return [
            (whole, np.concatenate([*masks, learned[last:]])),
            (table, np.zeros(len(table), learned.dtype)),
        ]

    def _noted(self, name: str, entry: Any, position: int, file: File, where: str, kept: Kept) -> Noted:
        modality, found = self.modalities[name], located(entry, file, where, kept)
        sizes = called(modality, "measure", found.source(where))
        grid: Grid = (int(sizes[0]), int(sizes[1]), int(sizes[2]))
        vectors = int(modality.positions(grid))
        length = 1 if self.alone else vectors
        return Noted(name, position, length, vectors, grid, self._relative(found.path), found.offset, found.size)

    def _relative(self, path: str) -> str:
        """A path without the folder of all data files, which may move; an address as it is."""
        return posixpath.relpath(path, self.root) if path.startswith("/") else path


def called(modality: Modality, method: str, source: ItemSource) -> Any:
    """The answer of a modality about an item.

    Raises:
        ConfigError: naming the file and the record.
    """
    try:
        return getattr(modality, method)(source)
    except ForgeError:
        raise
    except OSError as error:
        raise ConfigError(f"{source}: can't be read: {error.strerror or describe(error)}.") from error
    except Exception as error:  # whatever a decoder makes of a broken file
        raise ConfigError(f"{source}: is no {modality.name} that can be read: {describe(error)}.") from error


def _times(count: int) -> str:
    return {0: "not once", 1: "once"}.get(count, f"{count} times")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}…"

"""The fields of records that hold their items."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train.base.errors import ForgeError, describe
from forge_train.base.format import format_list

from ...enabled_modalities import enabled_modalities
from ...modalities import ItemSource, Modality
from ..files import find
from .extras import RowItems
from .notes import FORMAT

if TYPE_CHECKING:
    from forge_train import Job


class BrokenItemError(ConfigError):
    """An item can't be read."""


@dataclass(frozen=True)
class ItemFields:
    """The fields of records that hold their items: of a modality `image`, several under `images`, or one under `image`.

    Args:
        modalities: of the run, by name.
        alone: whether an item takes one position, rather than one for each of its feature vectors.
        root: the folder of all data files.
        folder: the folder of relative paths; empty for that of the record's file.
        skip: whether a record with an item that can't be read is left out, rather than an error.
        place: where items stand in a text without any placeholder of theirs: `before` or `after` it; empty for an
            error.
    """

    modalities: Mapping[str, Modality]
    alone: bool
    root: str
    folder: str = ""
    skip: bool = False
    place: str = ""

    @classmethod
    def of(
        cls,
        job: Job,
        paths: str | tuple[str, ...],
        key: str,
        folder: str = "",
        *,
        skip: bool = False,
        place: str = "",
    ) -> ItemFields | None:
        """The fields for the modalities of a run; None if it has none.

        Args:
            job: of the run.
            paths: the data files.
            key: the section that names them.
            folder: the folder of relative paths.
            skip, place: see above.

        Raises:
            ConfigError: there are no such files, or no such folder.
        """
        modalities = enabled_modalities(job)
        if folder and not modalities:
            raise ConfigError(f"{key}.items: has no effect: no enabled plugin gives a modality; leave it out.")
        if not modalities:
            return None
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"{key}.items: {folder} is no folder.")
        folders = [posixpath.dirname(file.address) for file in find(paths, key=f"{key}.path") if file.local]
        alone = job.hooks.gives("fusion") == "token"
        root = posixpath.commonpath(folders) if folders else "/"
        return cls(modalities, alone, root, folder and str(Path(folder).expanduser().absolute()), skip, place)

    def public(self) -> dict[str, Any]:
        """The settings that determine the result."""
        each = {name: {"placeholder": one.placeholder, **one.public()} for name, one in self.modalities.items()}
        chosen = {key: value for key in ("folder", "place") if (value := getattr(self, key))}
        return {
            "items": each,
            "alone": self.alone,
            "table": FORMAT,
            **chosen,
            **({"broken": "skip"} if self.skip else {}),
        }

    def entries(self, record: Mapping[str, Any], where: str) -> dict[str, list[Any]]:
        """The items of a record as it has them, by modality.

        Raises:
            ConfigError: a field holds no list.
        """
        found: dict[str, list[Any]] = {}
        for name in self.modalities:
            several, one = record.get(f"{name}s"), record.get(name)
            if several is not None and not isinstance(several, list):
                raise ConfigError(f"{where}: {f'{name}s'!r}: expected a list of items, found {short(several)}.")
            found[name] = [*(several or []), *([] if one is None else one if isinstance(one, list) else [one])]
        return found

    def placed(self, text: str, entries: Mapping[str, list[Any]]) -> str:
        """The text of a record with placeholders: `<image>` stands for that of a modality `image`, too; and items may
        need none."""
        for name, modality in self.modalities.items():
            text = text.replace(f"<{name}>", modality.placeholder)
            if self.place and modality.placeholder not in text:
                all_of_them = modality.placeholder * len(entries[name])
                text = all_of_them + text if self.place == "before" else text + all_of_them
        return text

    def check(self, record: Mapping[str, Any], text: str, where: str) -> None:
        """Refuse a text with placeholders of items that no modality reads.

        Raises:
            ConfigError: naming the field that has the items.
        """
        for field in record:
            name = field.removesuffix("s")
            if f"<{name}>" in text and name not in self.modalities and record[field]:
                raise ConfigError(
                    f"{where}: no enabled plugin gives a modality {name!r}, whose items are under {field!r}; there is "
                    f"{format_list(map(repr, self.modalities))}."
                )


def no_items(job: Job) -> dict[str, RowItems]:
    """A row without items of the modalities of a run."""
    sequence = job.config.train.sequence
    return {name: RowItems.none(one.features, sequence) for name, one in enabled_modalities(job).items()}


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


def short(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}…"

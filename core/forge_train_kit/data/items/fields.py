"""The fields of records that hold their items."""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_train import ConfigError
from forge_train.base.errors import ForgeError, describe, nearest
from forge_train.base.format import format_list

from ...enabled_modalities import enabled_modalities
from ...hookspecs import modalities
from ...modalities import ItemSource, Modality
from ...stores.addresses import is_remote
from ..files import find
from .extras import RowItems
from .notes import FORMAT

if TYPE_CHECKING:
    from forge_train import Job


log = logging.getLogger("forge_train")

Broken = Literal["stop", "skip", "replace"]
"""Treatment of an item that can't be read: an error, its record is left out, or an empty item stands in for it."""


_FILE = re.compile(r"\S\.\w{2,4}$")
"""End of a file's name."""


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
        broken: treatment of items that can't be read.
        decoded: whether items are decoded when records are prepared, and kept beside the tokens.
        place: where items stand in a text without any placeholder of theirs: `before` or `after` it; empty for an
            error.
    """

    modalities: Mapping[str, Modality]
    alone: bool
    root: str
    folder: str = ""
    broken: Broken = "stop"
    place: str = ""
    decoded: bool = False

    @classmethod
    def of(
        cls,
        job: Job,
        paths: str | tuple[str, ...],
        key: str,
        folder: str = "",
        *,
        broken: Broken = "stop",
        place: str = "",
        decoded: bool = False,
    ) -> ItemFields | None:
        """The fields for the modalities of a run; None if it has none.

        Args:
            job: of the run.
            paths: the data files.
            key: the section that names them.
            folder: the folder of relative paths.
            broken, place, decoded: see above.

        Raises:
            ConfigError: there are no such files, or no such folder; or items can't be replaced.
        """
        modalities = enabled_modalities(job)
        _check_broken(broken, modalities, key)
        if folder and not modalities:
            raise ConfigError(f"{key}.items: has no effect: no enabled plugin gives a modality; leave it out.")
        if not modalities:
            return None
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"{key}.items: {folder} is no folder.")
        alone, root = job.hooks.gives("fusion") == "token", root_of(paths, f"{key}.path")
        return cls(
            modalities, alone, root, folder and str(Path(folder).expanduser().absolute()), broken, place, decoded
        )

    def public(self) -> dict[str, Any]:
        """The settings that determine the result."""
        each = {name: {"placeholder": one.placeholder, **one.public()} for name, one in self.modalities.items()}
        chosen = {key: value for key in ("folder", "place") if (value := getattr(self, key))}
        return {
            "items": each,
            "alone": self.alone,
            "table": FORMAT,
            **chosen,
            **({} if self.broken == "stop" else {"broken": self.broken}),
            **({"decoded": True} if self.decoded else {}),
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

    def check_spelling(self, record: Mapping[str, Any], found: Mapping[str, list[Any]], where: str) -> None:
        """Refuse items under nearly the name of a modality of which the record has none.

        Args:
            found: the record's items, by modality.

        Raises:
            ConfigError: naming the field.
        """
        read = {one for modality in self.modalities for one in (modality, f"{modality}s")}
        missing = [one for name in self.modalities if not found[name] for one in (f"{name}s", name)]
        for field, value in record.items():
            if field not in read and _like_items(value) and (hint := nearest(field.lower(), missing)):
                raise ConfigError(f"{where}: nothing reads the items under {field!r}.{hint}")

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


def root_of(paths: str | Sequence[str], key: str) -> str:
    """The folder of all data files.

    Args:
        paths: the data files.
        key: that names them.

    Raises:
        ConfigError: there are no such files.
    """
    folders = [posixpath.dirname(file.address) for file in find(paths, key=key) if file.local]
    return posixpath.commonpath(folders) if folders else "/"


def no_items(job: Job) -> dict[str, RowItems]:
    """A row without items of the modalities of a run."""
    sequence = job.config.train.sequence
    return {name: RowItems.none(one.features, sequence) for name, one in enabled_modalities(job).items()}


def warn_of_none(job: Job) -> None:
    """Warn where a run's model takes in items and its data has none; a plugin may add them to batches."""
    for plugin, given in modalities(job):
        if not given or not job.dist.main or plugin in job.hooks.implementers("prepare_batch"):
            continue
        log.warning(
            "The model takes in items of %s (plugin %r), but the data plugin reads none: its encoder learns nothing, "
            "and %s in a text is a word. Enable a data plugin that reads items, or disable %r.",
            format_list(repr(one.name) for one in given),
            plugin,
            format_list(repr(one.placeholder) for one in given),
            plugin,
        )


def called(modality: Modality, method: str, source: ItemSource) -> Any:
    """The answer of a modality about an item.

    Raises:
        ConfigError: naming the file and the record.
    """
    try:
        return getattr(modality, method)(source)
    except (ForgeError, MemoryError):  # the latter says nothing of the item
        raise
    except OSError as error:
        raise ConfigError(f"{source}: can't be read: {error.strerror or describe(error)}.") from error
    except Exception as error:  # whatever a decoder makes of a broken file
        raise ConfigError(f"{source}: is not a readable {modality.name}: {describe(error)}.") from error


def _check_broken(broken: Broken, modalities: Mapping[str, Modality], key: str) -> None:
    """Refuse to replace items where nothing can stand in for them."""
    if broken != "replace":
        return
    option = f"{key.partition('.')[0]}.prefetch.on_error: 'replace'"
    if not modalities:
        raise ConfigError(f"{option} is for items, and no enabled plugin gives a modality; choose 'stop' or 'skip'.")
    for name, one in modalities.items():
        if not hasattr(one, "smallest"):
            raise ConfigError(f"{option}: modality {name!r} does not say how small an item may be; choose 'skip'.")


def _like_items(value: Any) -> bool:
    """Return True if a value could be an item, or a list of them."""
    if isinstance(value, list):
        return bool(value) and all(map(_like_items, value))
    if isinstance(value, Mapping):
        return any(isinstance(value.get(key), str | bytes) for key in ("bytes", "path", "url", "base64"))
    if isinstance(value, str):
        return value.startswith("data:") or is_remote(value) or bool(_FILE.search(value))
    return isinstance(value, bytes)


def short(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}…"

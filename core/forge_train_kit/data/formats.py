"""File formats: plugins that turn files into records. Found by a file's suffix, and imported on first use.

A distribution adds one through an entry point of the group `forge_train.formats`, whose name is the suffix without the
dot and whose object is a `Format`:

    [project.entry-points."forge_train.formats"]
    csv = "my_package:CSV"
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Protocol

from forge_train import ConfigError
from forge_train.base.errors import ForgeError, describe, nearest
from forge_train.registry.discovery import identity

if TYPE_CHECKING:
    from .file import File

GROUP = "forge_train.formats"
END = 2**63 - 1
"""The `stop` of a part that reaches to the end of a file, wherever that is."""

Record = Mapping[str, Any]
"""One sample as a file has it: field → value. A file of plain text is one record, `{"text": …}`."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a file that can be read apart from the others, by any process.

    Args:
        start: where it begins, in what the format counts: bytes, row groups, record batches.
        stop: where it ends (exclusive).
        bytes: about how much is read for it; what progress is counted in.
        records: how many it has, where the file says so.
    """

    start: int
    stop: int
    bytes: int
    records: int | None = None


class Format(Protocol):
    """Reader of one kind of file. Constructed without arguments, and stateless.

    Adjacent parts may be read as one: from the first one's `start` to the last one's `stop`.
    """

    def parts(self, file: File) -> Sequence[Part]:
        """The file in pieces of some 16 MB, in order; a single one where its medium can't be entered in the middle.

        Raises:
            ConfigError: the file is not of this format, is truncated or can't be read.
        """
        ...

    def read(self, file: File, part: Part) -> Iterator[tuple[str, Record]]:
        """The records of a part, in order, each with its place: `line 7`, `row 12`; the empty text where
        the record is the whole file. Memory is bounded, whatever the part's size.

        Raises:
            ConfigError: naming the file and the place.
        """
        ...


class NotTextError(ConfigError):
    """A file that should be plain text, and is not. A folder may well have such files beside its text."""


def kinds() -> Mapping[str, str]:
    """Suffix → kind, of all that can be read. Suffixes that one object reads are of one kind: .txt and .md, say."""
    return {suffix: points[0].value for suffix, points in sorted(_points().items())}


def lookup(suffix: str, label: str) -> Format:
    """The format of files with a suffix.

    Args:
        suffix: without the dot, in lower case (`File.suffix`).
        label: of what has the suffix, for messages (`File.label`).

    Raises:
        ConfigError: no format or more than one claims the suffix, or its module can't be imported.
    """
    found = _points().get(suffix, [])
    if not found:
        known = sorted(_points())
        raise ConfigError(
            f"{label}: no format is known for {f'.{suffix}' if suffix else 'a name without a suffix'} (there are "
            f".{', .'.join(known)}).{nearest(suffix, known)} Convert it, or install a package that reads it."
        )
    if len(found) > 1:
        owners = " and ".join(" ".join(identity(point.dist)) for point in found)
        raise ConfigError(f"{label}: .{suffix} is read by {owners}; uninstall one.")
    try:
        made: Format = found[0].load()()
    except (Exception, SystemExit) as error:  # whatever a stranger's module does while it is imported
        reason = str(error) if isinstance(error, ForgeError) else describe(error)
        owner = " ".join(identity(found[0].dist))
        raise ConfigError(f"{label}: the format {found[0].value} of {owner} can't be loaded: {reason}") from error
    return made


@cache
def _points() -> Mapping[str, list[EntryPoint]]:
    points: dict[str, list[EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        points.setdefault(point.name.lower(), []).append(point)
    return points


def require(module: str, label: str) -> Any:
    """A module of the extra `data`, imported when a file needs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ConfigError(f"{label} needs {name} to be read: pip install 'forge-train[data]'") from error


def text_of(record: Record, field: str, where: str, key: str) -> str:
    """The text under a field.

    Args:
        where: the file and the place in it, for messages (`File.at(place)`).
        key: the configuration key or argument that names the field.

    Raises:
        ConfigError: there is no text there; it lists the fields that there are.
    """
    if isinstance(text := record.get(field), str):
        return text
    if field in record:
        has = f"has {json.dumps(record[field], default=str)[:40]} there"
    else:
        has = f"has {', '.join(map(repr, record))}" if record else "is empty"
    raise ConfigError(f"{where}: no string under {field!r} ({key}); the record {has}")


def utf8(text: str, where: str) -> bytes:
    """A text as bytes.

    Args:
        text: of a record; JSON can hold one half of a surrogate pair, which is no character.
        where: the file and the place in it, for messages.

    Raises:
        ConfigError: there is half a surrogate pair in it.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} has half a surrogate pair at character {error.start}") from error

"""What a file format is: a plugin that turns files into records. Found by a file's suffix, imported when it is met.

A distribution adds one through an entry point of the group `forge_train.formats`, whose name is the suffix without the
dot and whose object is a `Format`:

    [project.entry-points."forge_train.formats"]
    csv = "my_package:CSV"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .files import File

GROUP = "forge_train.formats"

Record = Mapping[str, Any]
"""One sample as a file has it: field → value. A file of plain text is one record, `{"text": …}`."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a file that can be read apart from the others, by any process.

    Args:
        start: where it begins, in what the format counts: bytes, row groups, record batches.
        stop: where it ends (exclusive).
        bytes: about how much is read for it; what progress is counted in.
    """

    start: int
    stop: int
    bytes: int


class Format(Protocol):
    """How files of one kind are read. Made without arguments, and without state."""

    def parts(self, file: File) -> Sequence[Part]:
        """The file in pieces of some 16 MB, in order; a single one where its medium can't be entered in the middle.

        Raises:
            ConfigError: the file is not of this format, is truncated or can't be read.
        """
        ...

    def read(self, file: File, part: Part) -> Iterator[tuple[str, Record]]:
        """The records of a part, in order, each with its place: `line 7`, `row 12`. Memory is bounded, whatever the
        part's size.

        Raises:
            ConfigError: naming the file and the place.
        """
        ...

"""The records of a forward-only job, in the order of the files."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from forge_train_kit.data.files import File, find
from forge_train_kit.data.formats import END, Part, lookup

KEY = "--data"
_BLOCK = 1 << 20

Placed = tuple[int, str, Mapping[str, Any], str]
"""A record: its number, its place for messages, its content, and the folder of its file."""


@dataclass(frozen=True)
class Records:
    """The records of any files that Forge reads as training data.

    Args:
        sources: files, folders, patterns or addresses.
        key: the option that names them, for messages.
    """

    sources: Sequence[str]
    key: str = KEY

    @property
    def files(self) -> list[File]:
        """The files behind the sources.

        Raises:
            ConfigError: there are none, or of several kinds.
        """
        return find(list(self.sources), key=self.key)

    @property
    def digest(self) -> str:
        """Of the content of all files."""
        found = hashlib.blake2b(digest_size=16)
        for file in self.files:
            found.update(repr((file.suffix, file.packed)).encode())
            with file.open() as stream:
                while block := stream.read(_BLOCK):
                    found.update(block)
        return found.hexdigest()

    def read(self, start: int = 0) -> Iterator[Placed]:
        """Yield the records from number `start` on.

        Raises:
            ConfigError: naming the file and the place of what can't be read.
        """
        return islice(self._all(), start, None)

    def _all(self) -> Iterator[Placed]:
        number = 0
        for file in self.files:
            form, folder = lookup(file.suffix, file.label), posixpath.dirname(file.address)
            for place, record in form.read(file, whole(form.parts(file))):
                yield number, file.at(place), record, folder
                number += 1


def whole(parts: Sequence[Part]) -> Part:
    """All parts of a file as one."""
    return Part(parts[0].start, parts[-1].stop, sum(part.bytes for part in parts)) if parts else Part(0, END, 0)

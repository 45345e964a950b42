"""Files of data, on this machine or anywhere fsspec reaches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

PACKED = ("gz", "zst")
"""Suffixes of files that are unpacked while they are read."""


@dataclass(frozen=True, slots=True)
class File:
    """One file.

    Args:
        address: an absolute path, or an address that fsspec knows (`s3://…`, `https://…`, `memory://…`).
        named: whether it was asked for by this very name, and not found in a folder or by a pattern.
    """

    address: str
    named: bool = False

    @property
    def packed(self) -> str:
        """`gz` or `zst`, or the empty string."""
        last = PurePosixPath(self.address).suffix.lower().removeprefix(".")
        return last if last in PACKED else ""

    @property
    def suffix(self) -> str:
        """Of what it holds, without the dot and in lower case: `jsonl` for `a.jsonl.gz`."""
        path = PurePosixPath(self.address)
        return (PurePosixPath(path.stem) if self.packed else path).suffix.lower().removeprefix(".")

"""The format of plain text: the whole file is one record."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence

from forge_train_kit.data.files import File
from forge_train_kit.data.formats import NotTextError, Part, Record, kinds

_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"SQLite format 3": "SQLite",
    b"%PDF-": "PDF",
}
"""First bytes of files in these formats."""


class Plain:
    """UTF-8, without a byte order mark."""

    def parts(self, file: File) -> Sequence[Part]:
        return [Part(0, 1, file.size(), records=1)]

    def read(self, file: File, part: Part) -> Iterator[tuple[str, Record]]:
        yield "", {"text": _text(file)}


def _text(file: File) -> str:
    with file.open() as stream:
        data = stream.read().removeprefix(codecs.BOM_UTF8)  # no text: some editors begin files with it
    if wrong := _not_text(data) or (_records(data) if file.suffix not in kinds() else ""):
        raise NotTextError(f"{file.label} is not plain text: {wrong}")
    return data.decode("utf-8")


def _not_text(data: bytes) -> str:
    """Explain why `data` is not text; empty if it is."""
    if kind := next((kind for start, kind in _MAGIC.items() if data.startswith(start)), ""):
        return f"it is in {kind} format"
    if (at := data.find(b"\0")) >= 0:
        return f"a NUL byte at {at}"
    if data.isascii():
        return ""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte 0x{data[error.start]:02x} at {error.start} ({error.reason})"
    return ""


def _records(data: bytes) -> str:
    """Explain that a file without a known name holds JSON, whose text is in one field; empty if it doesn't."""
    if data.lstrip()[:1] not in (b"[", b"{"):
        return ""
    for part, suffix in ((data, "json"), (data.splitlines()[0], "jsonl")):
        try:
            json.loads(part)
        except (ValueError, RecursionError):
            continue
        return f"it is JSON: give it a name that ends in .{suffix}"
    return ""

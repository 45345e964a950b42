"""Files into documents, and documents into the training and the held-out part."""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from forge_train import ConfigError

from .sources import SUFFIXES, Source

Side = Literal["train", "validation"]

_CHUNK = 1 << 24
_FORMATS = {
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
"""How files of these formats begin."""
_POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that stands for another one, which Git LFS has not fetched."""
_WHOLE = 8
"""Held-out documents to expect before whole documents are held out: with 8, one corpus in 3000 ends up with none."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What one pass over the files found."""

    sources: list[Source]
    digest: str
    """Of the contents, in order; where the files lie does not enter."""
    documents: int


def survey(sources: Sequence[Source]) -> Survey:
    """Read all files once: is it text, how many documents are there, what is its digest.

    Files of a folder that are not UTF-8 are left out, and counted in the log.

    Raises:
        ConfigError: a file can't be read; a file that was named is not UTF-8 text; nothing is left.
    """
    digest = hashlib.blake2b(digest_size=16)
    kept: list[Source] = []
    skipped: list[Source] = []
    documents = 0
    for source in sources:
        _refuse_pointer(source)
        content = hashlib.blake2b(digest_size=16)
        if source.lines:
            count = 0
            for chunk in _chunks(source):
                content.update(chunk)
                count += chunk.count(b"\n")
            documents += max(count, 1)
        else:
            data = _read(source)
            if wrong := _not_text(data) or _records(source, data):
                if source.named:
                    raise ConfigError(f"text.path: {source.path} is not plain text: {wrong}")
                skipped.append(source)
                continue
            content.update(data)
            documents += 1
        digest.update(b"lines" if source.lines else b"whole")
        digest.update(content.digest())
        kept.append(source)
    if skipped:
        logging.getLogger("forge_train").warning(
            "text: left out %d of %d files that are not UTF-8 text, such as %s",
            len(skipped),
            len(sources),
            skipped[0].path,
        )
    if not kept:
        raise ConfigError(f"text.path: none of the {len(sources)} files is UTF-8 text (such as {skipped[0].path})")
    return Survey(kept, digest.hexdigest(), documents)


def read(source: Source, field: str) -> Iterator[bytes]:
    """The documents of a file as UTF-8, empty ones left out.

    Raises:
        ConfigError: the file can't be read; a line of a .jsonl is broken or lacks `field`.
    """
    if not source.lines:
        if data := _read(source):
            yield data
        return
    try:
        with source.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (document := _line(line, field, f"{source.path}:{number}")):
                    yield document
    except OSError as error:
        raise ConfigError(f"text.path: {source.path} can't be read: {error.strerror}") from error


def split(documents: Iterable[bytes], held_out: float, expected: int) -> Iterator[tuple[Side, bytes]]:
    """Divide documents into the training and the held-out part.

    A document is held out if the hash of its content says so: the choice does not depend on the other documents, and
    equal documents fall on the same side. Where that would leave fewer than about 8 (`expected` × `held_out`), as with
    one long file, the last `held_out` of every document is held out instead, from the beginning of a line.
    """
    whole = expected * held_out >= _WHOLE
    for document in documents:
        if not held_out:
            yield "train", document
        elif whole:
            chosen = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest()) < held_out * 2.0**64
            yield ("validation" if chosen else "train"), document
        else:
            cut = _cut(document, int(len(document) * (1 - held_out)))
            if cut:
                yield "train", document[:cut]
            if cut < len(document):
                yield "validation", document[cut:]


def _cut(document: bytes, at: int) -> int:
    line = document.find(b"\n", at) + 1
    if 0 < line < len(document):
        return line
    while at < len(document) and document[at] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        at += 1
    return at


def _refuse_pointer(source: Source) -> None:
    """Whoever cloned a data set without its contents means these, not the few lines in their place."""
    try:
        with source.path.open("rb") as file:
            start = file.read(len(_POINTER))
    except OSError as error:
        raise ConfigError(f"text.path: {source.path} can't be read: {error.strerror}") from error
    if start == _POINTER:
        raise ConfigError(
            f"text.path: {source.path} only points to a file that Git LFS has not fetched: run git lfs pull in its "
            "folder."
        )


def _read(source: Source) -> bytes:
    try:
        return source.path.read_bytes().removeprefix(codecs.BOM_UTF8)  # no text: some editors begin files with it
    except OSError as error:
        raise ConfigError(f"text.path: {source.path} can't be read: {error.strerror}") from error


def _chunks(source: Source) -> Iterator[bytes]:
    try:
        with source.path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        raise ConfigError(f"text.path: {source.path} can't be read: {error.strerror}") from error


def _not_text(data: bytes) -> str:
    """What makes `data` no text, or an empty string."""
    if kind := next((kind for start, kind in _FORMATS.items() if data.startswith(start)), ""):
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


def _records(source: Source, data: bytes) -> str:
    """Whether a file of no known name holds JSON: then its text is in some field, and the rest is not to be learned."""
    if source.path.suffix in SUFFIXES or data.lstrip()[:1] not in (b"[", b"{"):
        return ""
    for part, advice in ((data, "convert it to one object on each line, in a .jsonl file"), (data.splitlines()[0], "")):
        try:
            json.loads(part)
        except (ValueError, RecursionError):
            continue
        return f"it is JSON: {advice or 'give it a name that ends in .jsonl'}, with the text under text.field"
    return ""


def _line(line: bytes, field: str, where: str) -> bytes:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise ConfigError(f"text.path: {where}: not UTF-8 ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"text.path: {where}: not JSON ({error})") from error
    if not isinstance(record, dict) or not isinstance(text := record.get(field), str):
        has = f"has {', '.join(map(repr, record))}" if isinstance(record, dict) else f"is a {type(record).__name__}"
        if isinstance(record, dict) and field in record:
            has = f"has {json.dumps(record[field])[:40]} there"
        raise ConfigError(f"text.path: {where}: no string under {field!r} (text.field); the line {has}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"text.path: {where}: {field!r} has half a surrogate pair at character {error.start}"
        ) from error

"""Files into documents, and documents into the training and the held-out part."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from forge_train import ConfigError
from forge_train_kit.data.files import File
from forge_train_kit.data.formats import NotTextError, Part, kinds, text_of
from forge_train_kit.data.held_out import FEW, Side, divided

from .sources import form, is_plain

_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class Survey:
    """Result of one pass over the files."""

    files: list[File]
    digest: str
    """Of the contents, unpacked, in order; where the files lie does not enter."""
    documents: int
    """Number of documents; lines, if a format does not count its records."""


def survey(files: Sequence[File]) -> Survey:
    """Read all files once: check that they are text, count the documents, and compute the digest.

    Files of a folder that are not UTF-8 are left out, and counted in the log.

    Raises:
        ConfigError: a file can't be read; a file that was named is not UTF-8 text; nothing is left.
    """
    digest = hashlib.blake2b(digest_size=16)
    kept: list[File] = []
    skipped: list[File] = []
    documents = 0
    for file in files:
        try:
            content, count = _plain(file) if is_plain(file) else _records(file)
        except NotTextError:
            if file.named:
                raise
            skipped.append(file)
            continue
        digest.update(content)
        documents += count
        kept.append(file)
    if skipped:
        logging.getLogger("forge_train").warning(
            "text: left out %d of %d files that are not UTF-8 text, such as %s",
            len(skipped),
            len(files),
            skipped[0].address,
        )
    if not kept:
        raise ConfigError(f"text.path: none of the {len(files)} files is UTF-8 text (such as {skipped[0].address})")
    return Survey(kept, digest.hexdigest(), documents)


def read(file: File, field: str) -> Iterator[bytes]:
    """The documents of a file as UTF-8, empty ones left out.

    Raises:
        ConfigError: the file can't be read; a record is broken or lacks `field`.
    """
    field = "text" if is_plain(file) else field
    reader = form(file)
    if not (parts := reader.parts(file)):
        return
    whole = Part(
        parts[0].start, parts[-1].stop, sum(part.bytes for part in parts)
    )  # so that places count from the start
    for place, record in reader.read(file, whole):
        text = record.get(field)
        if not isinstance(text, str):
            text = text_of(record, field, file.at(place), "text.field")
        try:
            document = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{file.at(place)}: {field!r} has half a surrogate pair at character {error.start}"
            ) from error
        if document:
            yield document


def split(documents: Iterable[bytes], held_out: float, expected: int) -> Iterator[tuple[Side, bytes]]:
    """Divide documents into the training and the held-out part.

    A document is held out if the hash of its content says so: the choice does not depend on the other documents, and
    equal documents fall on the same side. Where that would leave fewer than about 8 (`expected` × `held_out`), as with
    one long file, the last `held_out` of every document is held out instead, from the beginning of a line.
    """
    whole = expected * held_out >= FEW
    for document in documents:
        yield from divided(document, held_out, whole=whole)


def _plain(file: File) -> tuple[bytes, int]:
    """Digest of the kind and the content, and the number of documents."""
    data = b"".join(read(file, ""))
    return b"whole" + hashlib.blake2b(data, digest_size=16).digest(), 1


def _records(file: File) -> tuple[bytes, int]:
    parts = form(file).parts(file)
    content = hashlib.blake2b(digest_size=16)
    lines = 0
    with file.open() as stream:
        while chunk := stream.read(_CHUNK):
            content.update(chunk)
            lines += chunk.count(b"\n")
    counts = [part.records for part in parts if part.records is not None]
    kind = b"lines" if kinds()[file.suffix] == kinds().get("jsonl") else file.suffix.encode()
    return kind + content.digest(), sum(counts) if len(counts) == len(parts) > 0 else max(lines, 1)

"""The format of WebDataset: a tar file whose members with the same name and different suffixes are one sample."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any

from forge_train import ConfigError
from forge_train_kit.data.files import File
from forge_train_kit.data.formats import END, Part, Record

_TEXTS = ("txt", "text", "caption")
_KINDS = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm"), "image"),
    **dict.fromkeys(("mp4", "webm", "mkv", "mov", "avi"), "video"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a"), "audio"),
}


class Tar:
    """A record for each run of members with one name: `000.jpg`, `000.txt`.

    `.txt` becomes the field `text`, and the object in `.json` becomes fields of their names. All other members are
    items, in a list under their kind (`image`, `video`, `audio`), or their suffix. Of a file of this machine that is
    not packed, an item is its place there.
    """

    def parts(self, file: File) -> Sequence[Part]:
        return [Part(0, END, file.size())]

    def read(self, file: File, part: Part) -> Iterator[tuple[str, Record]]:
        key, record = "", dict[str, Any]()
        with file.open() as stream:
            try:
                with tarfile.open(fileobj=stream, mode="r|" if file.packed or not file.local else "r:") as members:
                    for member in members:
                        if not member.isreg():
                            continue
                        folder, slash, name = member.name.rpartition("/")
                        stem, _, suffix = name.partition(".")
                        if record and key != f"{folder}{slash}{stem}":
                            yield f"sample {key}", record
                            record = {}
                        key = f"{folder}{slash}{stem}"
                        _add(record, suffix.rpartition(".")[2].lower(), member, members, file)
            except (tarfile.TarError, EOFError) as error:
                place = f"after sample {key}" if key else ""
                raise ConfigError(f"{file.at(place)} is cut off, damaged or no tar file ({error})") from error
        if record:
            yield f"sample {key}", record


def _add(record: dict[str, Any], suffix: str, member: tarfile.TarInfo, members: tarfile.TarFile, file: File) -> None:
    """Add a member to the record of its sample."""
    if suffix in (*_TEXTS, "json"):
        where, content = file.at(f"member {member.name}"), _content(member, members)
        try:
            text = content.decode("utf-8")
            fields = json.loads(text) if suffix == "json" else {"text": text}
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not {'JSON' if suffix == 'json' else 'UTF-8'} ({error})") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: not an object but a {type(fields).__name__}")
        record.update(fields)
        return
    if file.packed or not file.local or member.sparse is not None:
        item: dict[str, Any] = {"bytes": _content(member, members)}
    else:
        item = {"path": file.address, "offset": member.offset_data, "size": member.size}
    record.setdefault(_KINDS.get(suffix, suffix), []).append(item)


def _content(member: tarfile.TarInfo, members: tarfile.TarFile) -> bytes:
    stream = members.extractfile(member)
    assert stream is not None  # a regular member
    return stream.read()

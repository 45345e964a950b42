"""The formats of JSON: an object on each line, or an array of objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from forge_train import ConfigError
from forge_train_kit.data.files import File
from forge_train_kit.data.formats import END, Part, Record

_PART = 1 << 24
_CHUNK = 1 << 20


class Lines:
    """JSON Lines: each line is an object, empty ones left out. A line belongs to the part it begins in.

    The place of a record is its line in parts that begin with the file, and the byte its line begins at in others:
    lines are counted only for errors.
    """

    def parts(self, file: File) -> Sequence[Part]:
        size = file.size()
        if file.packed or not file.local:
            return [Part(0, END, size)]
        return [Part(start, min(start + _PART, size), min(_PART, size - start)) for start in range(0, size, _PART)]

    def read(self, file: File, part: Part) -> Iterator[tuple[str, Record]]:
        with file.open(max(part.start - 1, 0)) as stream:
            at = part.start
            if part.start:
                at += len(stream.readline()) - 1  # the rest of a line that began before, or the end of that line
            number = 0
            while at < part.stop and (line := stream.readline()):
                number += 1
                if filled := bool(line.strip()):
                    record, wrong = _parse(line)
                    if wrong:
                        number += _lines_before(file, at) + 1 - number if part.start else 0
                        cut = "" if line.endswith(b"\n") else "; the file ends in this line"
                        array = number == 1 and line.lstrip().startswith(b"[")
                        hint = "; a file with one array of objects is read if its name ends in .json" if array else cut
                        raise ConfigError(f"{file.at(f'line {number}')}: {wrong}{hint}")
                place = f"byte {at}" if part.start else f"line {number}"
                at += len(line)
                if filled:
                    del line  # as long as the record
                    yield place, record


class Array:
    """A file with one JSON array of objects. All of it is held in memory while it is read."""

    def parts(self, file: File) -> Sequence[Part]:
        count = len(self._load(file))
        return [Part(0, count, file.size(), records=count)]

    def read(self, file: File, part: Part) -> Iterator[tuple[str, Record]]:
        for number, record in enumerate(self._load(file)[part.start : part.stop], part.start + 1):
            if not isinstance(record, dict):
                raise ConfigError(f"{file.at(f'element {number}')}: not an object but a {type(record).__name__}")
            yield f"element {number}", record

    def _load(self, file: File) -> list[Any]:
        with file.open() as stream:
            data = stream.read()
        advice = "a .json file is read if it holds one array of objects; one with an object on each line is .jsonl"
        try:
            whole = json.loads(data)
        except (ValueError, RecursionError) as error:
            if data.lstrip()[:1] == b"{":
                raise ConfigError(f"{file.label}: not an array: {advice}") from error
            raise ConfigError(f"{file.label}: not JSON ({error})") from error
        if not isinstance(whole, list):
            raise ConfigError(f"{file.label}: not an array but a {type(whole).__name__}: {advice}")
        return whole


def _parse(line: bytes) -> tuple[dict[str, Any], str]:
    """The object, or a phrase that says what is wrong."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 ({error.reason})"
    except json.JSONDecodeError as error:  # whose text has a line of its own
        return {}, f"not JSON ({error.msg} at character {error.pos + 1})"
    except (ValueError, RecursionError) as error:
        return {}, f"not JSON ({error})"
    if not isinstance(record, dict):
        return {}, f"not an object but a {type(record).__name__}"
    return record, ""


def _lines_before(file: File, stop: int) -> int:
    count = 0
    with file.open() as stream:
        while chunk := stream.read(min(_CHUNK, stop)):
            count, stop = count + chunk.count(b"\n"), stop - len(chunk)
    return count

"""The formats CSV and TSV: a header line, then a record on each line."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from typing import ClassVar

from forge_train import ConfigError
from forge_train_kit.data.files import File
from forge_train_kit.data.formats import END, Part, Record


class CSV:
    """Fields are text, between quotes where they contain the delimiter or line ends. A file is one part: only from its
    beginning can it be told whether a line end lies between quotes."""

    delimiter: ClassVar = ","

    def parts(self, file: File) -> Sequence[Part]:
        return [Part(0, END, file.size())]

    def read(self, file: File, part: Part) -> Iterator[tuple[str, Record]]:
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # of the whole process; documents are longer than 128 kB
        with io.TextIOWrapper(file.open(), encoding="utf-8-sig", newline="") as stream:
            lines = csv.reader(stream, delimiter=self.delimiter, strict=True)
            header: list[str] = []
            begin = 1
            while True:
                begin = lines.line_num + 1
                try:
                    fields = next(lines, None)
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{file.at(f'after line {begin - 1}')}: not UTF-8 ({error.reason})") from error
                except csv.Error as error:
                    raise ConfigError(f"{file.at(f'line {begin}')}: {error}") from error
                if fields is None:
                    return
                if not fields:
                    continue
                if not header:
                    header = fields
                    if twice := sorted({name for name in header if header.count(name) > 1}):
                        raise ConfigError(f"{file.at(f'line {begin}')}: two fields are named {twice[0]!r}")
                elif len(fields) != len(header):
                    raise ConfigError(
                        f"{file.at(f'line {begin}')}: {len(fields)} fields, where the header has {len(header)}"
                    )
                else:
                    yield f"line {begin}", dict(zip(header, fields, strict=True))


class TSV(CSV):
    """The same between tabs."""

    delimiter: ClassVar = "\t"

"""Reading TOML with the line of every key, which neither tomllib nor tomlkit tells."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forge_train.base.errors import ConfigError, describe
from forge_train.config.tree import Key

_HEADER = re.compile(r"\s*+(\[\[?)\s*+(?P<key>[^\]]*?[^\]\s])\s*+\]\]?\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"""\s*(?P<key>(?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")


@dataclass(frozen=True)
class Document:
    """A parsed TOML file."""

    path: Path
    data: Mapping[str, Any]
    lines: Mapping[Key, int]

    def line(self, key: Key) -> int:
        """The line a key stands on; for a table without a header that of its first key, and inside a value that of the
        key the value belongs to."""
        if key not in self.lines and (below := [n for other, n in self.lines.items() if other[: len(key)] == key]):
            return min(below)
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, 1)


def read(path: Path) -> Document:
    """Read a TOML file.

    Raises:
        ConfigError: if it can't be read, with the line if it is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin files with a mark
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        raise ConfigError(f"{path}: can't read the configuration: {reason}.") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        where = found.group(1) if found else str(text.count("\n") + 1)
        reason = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError(f"{path}:{where}: not valid TOML: {reason}.") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, thousands of brackets
        raise ConfigError(f"{path}: not a configuration: {describe(error)}.") from error
    return Document(path, data, index_lines(text))


def index_lines(text: str) -> dict[Key, int]:
    """Return the line number of each table and key in a valid TOML text, from 1."""
    lines: dict[Key, int] = {}
    table: Key = ()
    open_value = _OpenValue()
    for number, line in enumerate(text.split("\n"), start=1):
        if open_value:
            open_value.feed(line)
            continue
        if header := _HEADER.match(line):
            table = _parts(header["key"])
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault((*table, *_parts(assignment["key"])), number)
            open_value.feed(line[assignment.end() :])
    return lines


class _OpenValue:
    """Tracker of a value that spans lines, an array or a triple-quoted string: true while the value is open."""

    _TOKEN = re.compile(r"\"\"\"|'''|\"(?:\\.|[^\"\\])*\"|'[^']*'|[\[\]{}#]")
    # Two more quotes may stand before the closing three; in a string of double quotes any may be escaped.
    _REST: ClassVar = {
        '"""': re.compile(r'(?:\\.|[^\\])*?"{3,5}'),
        "'''": re.compile(r".*?'{3,5}"),
    }

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""

    def __bool__(self) -> bool:
        return bool(self._depth or self._quote)

    def feed(self, line: str) -> None:
        position = 0
        while position < len(line):
            if self._quote:
                rest = self._REST[self._quote].match(line, position)
                if rest is None:
                    return
                position, self._quote = rest.end(), ""
                continue
            token = self._TOKEN.search(line, position)
            if token is None or token.group() == "#":
                return
            position = token.end()
            if token.group() in ('"""', "'''"):
                self._quote = token.group()
            elif token.group() in "[{":
                self._depth += 1
            elif token.group() in "]}":
                self._depth -= 1


def _parts(key: str) -> Key:
    return tuple(part.strip("\"'") for part in _PART.findall(key))

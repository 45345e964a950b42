"""Files of a corpus, and their formats."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from forge_train import ConfigError
from forge_train_kit.data.files import NEVER, File, walk
from forge_train_kit.data.files import find as find_files
from forge_train_kit.data.formats import Format, kinds, lookup

KEY = "text.path"
_TESTS = frozenset({"test", "tests", "idle_test"})


def find(paths: str | Sequence[str]) -> list[File]:
    """The files behind `text.path`, in an order that depends on their names only.

    Args:
        paths: files, folders, glob patterns and addresses; empty for the running Python's standard library without its
            tests.

    Raises:
        ConfigError: one of them does not exist, can't be read, or holds no data or data of several kinds.
    """
    entries = [paths] if isinstance(paths, str) else list(paths)
    return find_files(entries, key=KEY) if any(entries) else _standard_library()


def describe(paths: str | Sequence[str]) -> str:
    """The corpus's name in messages."""
    entries = [paths] if isinstance(paths, str) else list(paths)
    return ", ".join(repr(entry) for entry in entries if entry) or "Python's standard library"


def is_plain(file: File) -> bool:
    """Return True if the file is one document: a named file without a known format is."""
    known = kinds()
    return known.get(file.suffix, known.get("txt")) == known.get("txt")


def form(file: File) -> Format:
    return lookup("txt" if is_plain(file) else file.suffix, file.label)


def _standard_library() -> list[File]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [File(str(path), key=KEY) for path in walk(root, KEY, NEVER | _TESTS) if path.suffix == ".py"]
    if not files:
        raise ConfigError(
            f"text.path: this Python's standard library ({root}) has no *.py files: set text.path to your own text"
        )
    return files

"""Which files a corpus consists of. Imports nothing beyond the standard library, so that it can run before torch."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_train import ConfigError

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""What is read in folders; a file that is named is read whatever it is called."""

_TESTS = frozenset({"test", "tests", "idle_test"})
_NEVER = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a corpus."""

    path: Path
    named: bool
    """Whether the configuration asks for this very file: then it must be text, where a folder's may be skipped."""

    @property
    def lines(self) -> bool:
        """Whether each line is a document (JSON lines) rather than the whole file."""
        return self.path.suffix == ".jsonl"


def find(paths: str | Sequence[str]) -> list[Source]:
    """The files behind `text.path`, in an order that depends on their names only.

    Args:
        paths: files, folders and glob patterns; empty for the running Python's standard library without its tests.

    Raises:
        ConfigError: one of them does not exist, can't be read, or holds no text file.
    """
    entries = [paths] if isinstance(paths, str) else list(paths)
    if not any(entries):
        return _standard_library()
    found: dict[Path, Source] = {}
    for entry in entries:
        for source in _expand(entry):
            known = found.setdefault(source.path, source)
            if source.named and not known.named:
                found[source.path] = source
    return list(found.values())


def describe(paths: str | Sequence[str]) -> str:
    """The corpus's name in messages."""
    entries = [paths] if isinstance(paths, str) else list(paths)
    return ", ".join(repr(entry) for entry in entries if entry) or "Python's standard library"


def _standard_library() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = [Source(path, named=False) for path in _walk(root, (".py",), _NEVER | _TESTS)]
    if not sources:
        raise ConfigError(
            f"text.path: this Python's standard library ({root}) has no *.py files: set text.path to your own text"
        )
    return sources


def _expand(entry: str) -> list[Source]:
    if not entry:
        raise ConfigError("text.path: one of the entries is empty")
    path = Path(entry).expanduser().absolute()
    if path.is_dir():
        sources = [Source(file, named=False) for file in _walk(path, SUFFIXES, _NEVER)]
        if not sources:
            raise ConfigError(f"text.path: {entry!r}: no {', '.join(SUFFIXES)} file in that folder")
        return sources
    if path.exists():
        return [_named(path)]
    if not any(sign in entry for sign in "*?["):
        raise ConfigError(f"text.path: {entry!r}: no such file or folder (looked for {path})")
    matches = map(Path, sorted(glob.glob(str(path), recursive=True)))  # Path.glob takes hidden files too
    sources = [_named(match) for match in matches if not match.is_dir()]
    if not sources:
        raise ConfigError(f"text.path: {entry!r}: the pattern matches no file")
    return sources


def _named(path: Path) -> Source:
    if not path.is_file():
        raise ConfigError(f"text.path: {path} is not a regular file: text is read more than once")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"text.path: {path} can't be read: permission denied")
    return Source(path, named=True)


def _walk(root: Path, suffixes: tuple[str, ...], never: frozenset[str]) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise ConfigError(f"text.path: {error.filename} can't be read: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if name not in never and not name.startswith("."))
        for name in sorted(files):
            if name.endswith(suffixes) and not name.startswith(".") and (path := Path(folder, name)).is_file():
                yield path

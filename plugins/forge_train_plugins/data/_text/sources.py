"""Which files a corpus consists of. Imports nothing beyond the standard library, so that it can run before torch."""

from __future__ import annotations

import functools
import glob
import logging
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_train import ConfigError
from forge_train.ground.present import few

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""What is read in folders; a file that is named is read whatever it is called."""

DATA = {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z", ".lz4"), "packed"),
    **dict.fromkeys((".json", ".ndjson", ".jsonlines", ".csv", ".tsv"), "records"),
    **dict.fromkeys((".parquet", ".arrow", ".feather", ".orc", ".avro"), "records"),
    **dict.fromkeys((".npy", ".npz", ".bin", ".h5", ".hdf5", ".tfrecord", ".mds", ".sqlite", ".db"), "numbers"),
    **dict.fromkeys((".safetensors", ".pt", ".pth", ".pkl"), "numbers"),
}
"""What holds data and is not read: a folder with such files is refused, lest what lies beside them is trained on."""
_ADVICE = {
    "packed": "unpack it first",
    "records": "convert it to .jsonl, with one JSON object on each line and the text under text.field",
    "numbers": "such files hold no text",
}
_ABOUT = re.compile(r"(readme|licen[cs]e|copying|notice|dataset_infos?)([._-].*)?", re.IGNORECASE)
"""Names of files that are about a folder. They are text only if they are named."""

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
    sources = [Source(path, named=False) for path in _walk(root, _NEVER | _TESTS) if path.suffix == ".py"]
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
        return _folder(entry, path)
    if path.exists():
        return [_named(path)]
    if not any(sign in entry for sign in "*?["):
        raise ConfigError(f"text.path: {entry!r}: no such file or folder (looked for {path})")
    matches = map(Path, sorted(glob.glob(str(path), recursive=True)))  # Path.glob takes hidden files too
    files, about = _apart(match for match in matches if not match.is_dir())
    if not files + about:
        raise ConfigError(f"text.path: {entry!r}: the pattern matches no file")
    if files:
        _tell_left_out(entry, *about)
    return [_named(file) for file in files or about]


def _folder(entry: str, root: Path) -> list[Source]:
    """The text files of a folder.

    Raises:
        ConfigError: there are none, or data of another kind lies beside them; it lists what is there.
    """
    files = list(_walk(root, _NEVER))
    rest, about = _apart(files)
    texts = [file for file in rest if file.name.endswith(SUFFIXES)]
    data = [file for file in rest if file.suffix.lower() in DATA]
    if data:
        also = f" The folder also has {_kinds(texts)}: to train on these alone, name them" if texts else ""
        example = f", such as text.path = {str(Path(entry) / '**' / f'*{texts[0].suffix}')!r}." if texts else ""
        raise ConfigError(
            f"text.path: {entry!r} holds {_kinds(data)}, such as {data[0].relative_to(root)}, which is not read: "
            f"{_ADVICE[DATA[data[0].suffix.lower()]]}.{also}{example}"
        )
    if not texts:
        found = f"; it has {_kinds(files)}" if files else ""
        hint = f". {about[0].name} is about the folder: name it if you mean to train on it" if about else ""
        raise ConfigError(f"text.path: {entry!r}: no {', '.join(SUFFIXES)} file in that folder{found}{hint}")
    _tell_left_out(entry, *about)
    return [Source(file, named=False) for file in texts]


def _apart(files: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Files, and those that are about their folder."""
    sides: tuple[list[Path], list[Path]] = ([], [])
    for file in files:
        sides[bool(_ABOUT.fullmatch(file.name))].append(file)
    return sides


@functools.cache
def _tell_left_out(entry: str, *files: Path) -> None:
    if files:
        names = ", ".join(sorted({file.name for file in files}))
        logging.getLogger("forge_train").info("text: left out of %r: %s. Name a file to train on it.", entry, names)


def _kinds(files: Iterable[Path]) -> str:
    """How many files there are of each kind: `3 .parquet, 1 .md`."""
    counts = Counter(file.suffix or file.name for file in files).most_common()
    return few((f"{number:,} {kind}" for kind, number in counts), 6)


def _named(path: Path) -> Source:
    if not path.is_file():
        raise ConfigError(f"text.path: {path} is not a regular file: text is read more than once")
    if kind := DATA.get(path.suffix.lower()):
        raw = " To train on the file's own characters, give it a name that ends in .txt." if kind == "records" else ""
        raise ConfigError(f"text.path: {path}: {path.suffix} files are not read as text: {_ADVICE[kind]}.{raw}")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"text.path: {path} can't be read: permission denied")
    return Source(path, named=True)


def _walk(root: Path, never: frozenset[str]) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise ConfigError(f"text.path: {error.filename} can't be read: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if name not in never and not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and (path := Path(folder, name)).is_file():
                yield path

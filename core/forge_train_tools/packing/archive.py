"""A pack as a zip or a folder: written the same each time, and read with care, because anybody may have made it."""

from __future__ import annotations

import hashlib
import logging
import lzma
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from forge_train.base.errors import ConfigError
from forge_train.base.files import regular_size
from forge_train.base.format import format_bytes
from forge_train.base.strict_json import COUNT, dumps, odd, parse_json

log = logging.getLogger("forge_train.progress")

FORMAT = 1
"""Of packs. It grows when a reader of older packs would misread newer ones."""
INDEX = "pack.json"
"""The file that lists and hashes the others."""
CHECKPOINTS = "run/checkpoints/"
"""Beginning of the names of weights, which `forge train` does not read."""
LARGEST, MOST_BYTES, MOST_FILES = 64 << 20, 1 << 30, 100_000
"""Bytes of the index, bytes of all files without weights, and number of files that are read."""
_CHUNK = 4 << 20
_DATA = {"key": str, "value": str, "state": str, "count?": COUNT, "bytes?": COUNT, "sha256?": str, "newer?": bool,
         "files?": [{"name": str, "bytes": COUNT, "sha256": str}]}  # fmt: skip
_SHAPE = {
    "format": COUNT,
    "run": str,
    "forge": str,
    "world": COUNT,
    "begins_at": str,
    "checkpoint": str,
    "masked": [str],
    "sources": {"*": str},
    "data": [_DATA],
    "files": {"*": {"bytes": COUNT, "sha256": str}},
}
_BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError)
"""Errors of `zipfile` for what it can't read: each compression has its own; NotImplementedError is for one that it does
not know, RuntimeError for a password."""


@dataclass(frozen=True)
class Pack:
    """An opened pack, all of it checked."""

    name: str
    """As the user names it."""
    folder: Path
    """The folder of its files, apart from weights."""
    index: Mapping[str, Any]
    """Content of `pack.json`."""
    zipped: bool

    @property
    def run(self) -> Path:
        """The record of the run, which reads as a run's folder."""
        return self.folder / "run"


def is_pack(path: Path) -> bool:
    """Return True for the name of a zip, whatever is there, and for a folder with a pack's index."""
    try:
        return path.suffix == ".zip" or (path / INDEX).is_file()
    except OSError:
        return False


def write(out: Path, files: Mapping[str, bytes | Path], index: Mapping[str, Any], *, zipped: bool) -> None:
    """Write a pack; equal files make equal bytes.

    Args:
        out: a new zip or folder.
        files: name → content, or the file that has it.
        index: content of `pack.json`, without `files`.
        zipped: whether it becomes a zip.
    """
    hashes: dict[str, dict[str, Any]] = {}
    if zipped:
        with zipfile.ZipFile(out, "x", zipfile.ZIP_DEFLATED, compresslevel=6) as made:
            for name in sorted(files):
                with made.open(_member(name), "w", force_zip64=True) as file:
                    hashes[name] = _copy(files[name], file)
            made.writestr(_member(INDEX), _as_text(index, hashes))
        return
    out.mkdir(exist_ok=True)
    for name in sorted(files):
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            hashes[name] = _copy(files[name], file)
    (out / INDEX).write_text(_as_text(index, hashes), encoding="utf-8")


def _as_text(index: Mapping[str, Any], hashes: Mapping[str, Any]) -> str:
    return dumps({"format": FORMAT, **index, "files": hashes}, indent=1) + "\n"


def _member(name: str) -> zipfile.ZipInfo:
    """A member whose header says nothing of when and where it was written."""
    found = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    found.create_system, found.external_attr = 3, (stat.S_IFREG | 0o644) << 16
    found.compress_type = zipfile.ZIP_STORED if name.endswith(".safetensors") else zipfile.ZIP_DEFLATED
    return found


def _copy(source: bytes | Path, target: IO[bytes]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    whole = len(source) if isinstance(source, bytes) else source.stat().st_size
    for chunk in [source] if isinstance(source, bytes) else _chunks(source):
        digest.update(chunk)
        size += len(chunk)
        target.write(chunk)
        if whole > _CHUNK:
            log.info("packing: %s of %s", format_bytes(size), format_bytes(whole), extra={"passing": True})
    if whole > _CHUNK:
        log.info("", extra={"passing": True})  # wipes the line
    return {"bytes": size, "sha256": digest.hexdigest()}


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


@contextmanager
def opened(path: Path) -> Iterator[Pack]:
    """Open a pack and check every file of it but weights, which a checkpoint's own manifest covers. A zip is unpacked
    without its weights, for as long as the block lasts.

    Raises:
        ConfigError: in one sentence, if it is damaged, was changed, or is no pack.
    """
    if path.is_dir():
        yield _checked(path, path, zipped=False)
        return
    if not path.exists():
        raise ConfigError(f"There is no {path}. `forge runs pack` makes one.")
    with tempfile.TemporaryDirectory(prefix="forge-pack-") as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                _unpack(path, archive, Path(folder))
        except _BROKEN as error:
            raise ConfigError(f"{path} is no whole zip: {str(error) or 'it ends too early'}.") from error
        except OSError as error:
            raise ConfigError(f"{path}: can't be read: {error.strerror or error}.") from error
        yield _checked(path, Path(folder), zipped=True)


def _unpack(path: Path, archive: zipfile.ZipFile, folder: Path) -> None:
    members = [one for one in archive.infolist() if not one.is_dir()]
    names = [one.filename for one in members]
    if INDEX not in names:
        raise ConfigError(f"{path} is no pack of a run: it has no {INDEX}. `forge runs pack` makes one.")
    if len(names) > MOST_FILES or len(set(names)) != len(names):
        raise ConfigError(f"{path} is no pack of a run: it has {len(names):,} files, or one of them twice.")
    for one in members:
        kind = stat.S_IFMT(one.external_attr >> 16)
        if not _is_safe(one.filename) or kind not in (0, stat.S_IFREG):
            raise ConfigError(f"{path} is no pack of a run: {one.filename[:100]!r} leads out of it, or is no file.")
    wanted = [one for one in members if not one.filename.startswith(CHECKPOINTS)]
    if (size := sum(one.file_size for one in wanted)) > MOST_BYTES:
        raise ConfigError(f"{path}: has {format_bytes(size)} of records; at most {format_bytes(MOST_BYTES)} are read.")
    for one in wanted:
        target = folder / one.filename
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            archive.open(one) as source,
            target.open("xb") as out,
        ):  # gives no more than `file_size`, and checks the sum
            shutil.copyfileobj(source, out, _CHUNK)


def _is_safe(name: str) -> bool:
    """Return True for the name of a file below a folder, on every system."""
    parts = PurePosixPath(name).parts
    plain = name.isprintable() and "\\" not in name and ":" not in name and str(PurePosixPath(name)) == name
    return plain and bool(parts) and parts[0] != "/" and ".." not in parts


def _checked(path: Path, folder: Path, *, zipped: bool) -> Pack:
    index = _index(path, folder / INDEX)
    size = 0
    for name, entry in index["files"].items():
        if not _is_safe(name):
            raise ConfigError(f"{path} is no pack of a run: {name[:100]!r} leads out of it.")
        if name.startswith(CHECKPOINTS):
            continue
        size += entry["bytes"]
        if size > MOST_BYTES:
            raise ConfigError(f"{path}: has more records than the {format_bytes(MOST_BYTES)} that are read.")
        if problem := _problem(folder, name, entry):
            raise ConfigError(f"{path}: {name} {problem}. Take the pack as it was made.")
    if zipped:
        there = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
        if more := sorted(there - index["files"].keys() - {INDEX}):
            raise ConfigError(f"{path}: {more[0]} was put in after it was packed. Take the pack as it was made.")
    for name in ("run/config.toml", "run/plugins.json"):
        if name not in index["files"]:
            raise ConfigError(f"{path} is no pack of a run: it has no {name}.")
    return Pack(str(path), folder, index, zipped)


def _problem(folder: Path, name: str, entry: Mapping[str, Any]) -> str:
    """Describe the file that is not as it was packed, in a phrase; empty for one that is."""
    file = folder / name
    try:
        if any(part.is_symlink() for part in (file, *file.parents[: name.count("/")])):
            return "is a link"
        if regular_size(file) == entry["bytes"]:
            digest = hashlib.sha256()
            for chunk in _chunks(file):
                digest.update(chunk)
            if digest.hexdigest() == entry["sha256"]:
                return ""
    except OSError as error:
        return "is missing" if isinstance(error, FileNotFoundError) else f"can't be read ({error.strerror})"
    return "is not as it was packed"


def _index(path: Path, file: Path) -> dict[str, Any]:
    try:
        if (size := regular_size(file)) > LARGEST:
            raise ValueError(f"it has {size:,} bytes")
        found = parse_json(file.read_text(encoding="utf-8"), unique=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {INDEX} can't be read: {str(error).partition(chr(10))[0][:200]}.") from error
    newer = isinstance(found, dict) and isinstance(found.get("format"), int) and found["format"] > FORMAT
    if newer:
        raise ConfigError(f"{path}: was packed by a newer forge. Upgrade forge-train.")
    if problem := odd(found, _SHAPE):
        raise ConfigError(f"{path} is no pack of a run: in {INDEX}, {problem}.")
    made: dict[str, Any] = found
    return made

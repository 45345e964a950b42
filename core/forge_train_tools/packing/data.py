"""The data files of a run: sizes and hashes, and their changes."""

from __future__ import annotations

import glob
import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_train.base.format import format_bytes

log = logging.getLogger("forge_train.progress")

NAMES = frozenset({"path", "paths", "file", "files", "folder", "folders", "data", "init_from"})
"""Last words of keys that name files."""
WRITTEN = frozenset({"run", "parallel", "checkpoint", "log", "defaults", "plugins", "without"})
"""Sections that name no data."""
LISTED = 1000
"""Most files of an entry that are listed one by one."""
_CHUNK = 16 << 20


def named(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Key and value of each option that may name data; of a list of tables, with the place in the list."""
    for key, value in config.items():
        if key.partition(".")[0] not in WRITTEN:
            yield from _texts(key, value)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    last = key.rpartition(".")[2]
    if isinstance(value, str):
        if value and "\n" not in value and last != "cache" and (last in NAMES or "/" in value):
            yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            if isinstance(inner, str):
                yield from ((f"{key}[{at}]", text) for _, text in _texts(key, inner))
            else:
                yield from _texts(f"{key}[{at}]", inner)


def manifest(config: Mapping[str, Any], folder: Path, *, ended: float = 0.0) -> list[dict[str, Any]]:
    """Hash the files that a configuration names.

    Args:
        config: dotted key → value, of a run.
        folder: where relative paths start.
        ended: time of the run's end; files that were changed after it are marked.

    Returns:
        For each option: `key`, `value`, `state` (`hashed`, `missing` or `address`) and, of what was hashed, `count`,
        `bytes`, `sha256`, `newer` and, if they are not too many, `files` with name, size and hash.
    """
    return [one for key, value in named(config) if (one := _entry(key, value, folder, ended))]


def _entry(key: str, value: str, folder: Path, ended: float) -> dict[str, Any] | None:
    plain = value.removeprefix("file://")
    if "://" in plain:
        return {"key": key, "value": value, "state": "address"}
    found = _files(folder / Path(plain).expanduser())
    if not found:
        looks = "/" in plain and (key.rpartition(".")[2].partition("[")[0] in NAMES or plain[0] in "./~")
        return {"key": key, "value": value, "state": "missing"} if looks or Path(plain).suffix else None
    files, total = [], hashlib.sha256()
    for name, file in found:
        size, digest = file.stat().st_size, _hash(file)
        files.append({"name": name, "bytes": size, "sha256": digest})
        total.update(f"{name if len(found) > 1 else ''} {size} {digest}\n".encode())
    if any(file.stat().st_size > _CHUNK for _, file in found):
        log.info("", extra={"passing": True})  # wipes the line
    return {
        "key": key,
        "value": value,
        "state": "hashed",
        "count": len(files),
        "bytes": sum(one["bytes"] for one in files),
        "sha256": total.hexdigest(),
        "newer": bool(ended) and max(file.stat().st_mtime for _, file in found) > ended,
        **({"files": files} if len(files) <= LISTED else {}),
    }


def _files(path: Path) -> list[tuple[str, Path]]:
    """Name and path of a file, of every file of a folder, or of every match of a pattern, sorted by name."""
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        inside = ((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
        return sorted(one for one in inside if not any(part.startswith(".") for part in one[0].split("/")))
    if not glob.has_magic(str(path)):
        return []
    root = path.parent
    while glob.has_magic(str(root)):
        root = root.parent
    matches = (Path(one) for one in glob.glob(str(path), recursive=True))
    return sorted((one.relative_to(root).as_posix(), one) for one in matches if one.is_file())


def _hash(file: Path) -> str:
    size, done, digest = file.stat().st_size, 0, hashlib.sha256()
    with file.open("rb") as data:
        while chunk := data.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if size > _CHUNK:
                said = f"hashing {file.name}: {format_bytes(done)} of {format_bytes(size)}"
                log.info(said, extra={"passing": True})
    return digest.hexdigest()


def changes(packed: list[dict[str, Any]], config: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str, str]]:
    """Describe each entry of a manifest that is not the same here: key, then, now."""
    values = dict(named(config))
    for then in packed:
        key = then["key"]
        value = values.get(key)
        if value is None:
            continue  # another configuration names no file there, which is told elsewhere
        now = _entry(key, value, folder, 0.0)
        if then["state"] != "hashed":
            why = "an address, not hashed" if then["state"] == "address" else "gone when the run was packed"
            yield key, f"{then['value']}: {why}", value
        elif now is None or now["state"] != "hashed":
            yield key, _described(then), "missing"
        elif now["sha256"] != then["sha256"]:
            yield key, _described(then), _changed(then, now)


def absent(packed: list[dict[str, Any]], config: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str, str]]:
    """Key, value here and description of the data that was packed and of which no file is here."""
    values = dict(named(config))
    for then in packed:
        value = values.get(then["key"])
        if then["state"] != "hashed" or value is None or "://" in value:
            continue
        if not _files(folder / Path(value).expanduser()):
            yield then["key"], value, _described(then)


def _described(entry: Mapping[str, Any]) -> str:
    files = f"{entry['count']:,} files, " if entry["count"] > 1 else ""
    return f"{files}{format_bytes(entry['bytes'])}, sha256 {entry['sha256'][:8]}"


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The names of files that are others, as far as both sides list them."""
    if "files" not in then or "files" not in now or max(then["count"], now["count"]) == 1:
        return f"changed: {_described(now)}"
    before, after = ({one["name"]: one["sha256"] for one in side["files"]} for side in (then, now))
    kinds = {
        "missing": sorted(before.keys() - after.keys()),
        "changed": sorted(name for name in before.keys() & after.keys() if before[name] != after[name]),
        "new": sorted(after.keys() - before.keys()),
    }
    parts = (f"{kind}: {', '.join(names[:3])}{_more(names)}" for kind, names in kinds.items() if names)
    return "; ".join(parts) or f"changed: {_described(now)}"


def _more(names: list[str]) -> str:
    return f" and {len(names) - 3:,} more" if len(names) > 3 else ""

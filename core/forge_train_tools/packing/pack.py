"""A run as one file or folder: all that is needed to repeat it and to compare the two."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_train import __version__
from forge_train.base.errors import ConfigError
from forge_train.base.names import PluginRef
from forge_train.registry.discovery import CONTRIB, NO_DISTRIBUTION
from forge_train_kit.fingerprint import fingerprint, source_files
from forge_train_kit.new_folder import claimed

from ..evaluation.results import FOLDER
from ..run_folder import RunFolder, flat
from . import archive
from .data import manifest
from .secrets import MASK, Secrets

log = logging.getLogger("forge_train")

RECORDS = (
    *("config.toml", "plugins.json", "composition.json", "environment.json", "outcome.json", "left_out.json"),
    *("metrics.jsonl", "events.jsonl"),
)
"""Files of a run that describe it."""
NEWEST = "newest"
"""Stands for the newest whole checkpoint."""


@dataclass(frozen=True)
class Packed:
    """A pack that was written."""

    path: Path
    index: Mapping[str, Any]
    files: int
    bytes: int


def pack(run: RunFolder, out: Path, page: str = "", *, checkpoint: str = "") -> Packed:
    """Write a pack of a run. The same run makes the same bytes, as long as its data does not change.

    Args:
        run: which may still train; the pack then ends where it is now.
        out: a new zip, or a new or empty folder.
        page: a report of the run, in HTML.
        checkpoint: `NEWEST`, or the name or step of a checkpoint to include.

    Raises:
        ConfigError: if the run can't be read, there is no such whole checkpoint, or `out` can't be written.
    """
    if out.suffix != ".zip" and out.suffix and not out.is_dir():
        raise ConfigError(f"{out}: a pack is a .zip, or a folder, whose name has no ending.")
    run.check()
    secrets = Secrets()
    texts = {f"run/{name}": run.path / name for name in RECORDS if (run.path / name).is_file()}
    texts |= {f"run/{file.relative_to(run.path).as_posix()}": file for file in _files(run.path / FOLDER)}
    files: dict[str, bytes | Path] = {name: _read(file, secrets) for name, file in texts.items()}
    if page:
        files["report.html"] = secrets.mask(page).encode()
    if text := (run.environment.get("given") or {}).get("text"):
        files["given.toml"] = secrets.mask(text).encode()
    weights = _weights(run, checkpoint, secrets) if checkpoint else None
    if weights:
        files |= {f"{archive.CHECKPOINTS}{weights.name}/{name}": file for name, file in _below(weights)}
    sources, code = _sources(run, secrets)
    base = Path(run.environment.get("folder") or ".")
    index = {
        "run": run.name,
        "forge": __version__,
        "world": world_of(run),
        "begins_at": _begins_at(run),
        "checkpoint": f"{archive.CHECKPOINTS}{weights.name}" if weights else "",
        "masked": sorted(key for key, value in _masked(files["run/config.toml"]).items() if MASK in str(value)),
        "sources": sources,
        "data": _data(run, base if base.is_dir() else Path(), secrets),
    }
    files |= code
    return _write(out, files, index)


def _write(out: Path, files: Mapping[str, bytes | Path], index: Mapping[str, Any]) -> Packed:
    size = sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in files.values())
    zipped = out.suffix == ".zip"
    if zipped and out.exists():
        raise ConfigError(f"{out}: exists already; choose another name, or remove it.")
    part = out.with_name(f".{out.name}.partial")
    try:
        if zipped:
            out.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            archive.write(part, files, index, zipped=True)
            part.replace(out)
        else:
            with claimed(out) as folder:
                archive.write(folder, files, index, zipped=False)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{out}: can't be written: {error.strerror or error}.") from error
    return Packed(out, index, len(files) + 1, size)


def _read(file: Path, secrets: Secrets) -> bytes:
    try:
        return secrets.mask(file.read_text(encoding="utf-8")).encode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: can't be read: {error}.") from error


def _masked(config: bytes | Path) -> dict[str, Any]:
    import tomllib

    assert isinstance(config, bytes)
    return dict(flat(tomllib.loads(config.decode())))


def _data(run: RunFolder, base: Path, secrets: Secrets) -> list[dict[str, Any]]:
    ended = next((event["time"] for event in reversed(run.events) if event["event"] == "run_finished"), 0.0)
    found = manifest(run.config, base, ended=ended)
    for one in found:
        if one.get("newer"):
            log.warning("%s: %s was changed after the run ended; its hash is today's.", one["key"], one["value"])
        if one["state"] == "missing":
            log.warning("%s: %s is not here, and is packed without a hash.", one["key"], one["value"])
        one["value"] = secrets.mask(one["value"])
    return found


def world_of(run: RunFolder) -> int:
    """The number of processes that ended the run."""
    begun = [event["world"] for event in run.events if event["event"] == "run_started"]
    return int(begun[-1]) if begun else 1


def _begins_at(run: RunFolder) -> str:
    """The checkpoint of another run that this one continues; empty if it began by itself."""
    name = run.name
    for event in run.events:
        if event["event"] == "run_started":
            name = event["run"]
        elif event["event"] == "resumed":
            path = Path(event["checkpoint"])
            return "" if path.parent.parent.name in (name, run.name) else str(path)
        elif event["event"] in ("checkpoint_saved", "evaluation"):
            break
    return ""


def _weights(run: RunFolder, wanted: str, secrets: Secrets) -> Path:
    from forge_train.checkpoint import found, seal  # which import torch

    there = found.found(run.path / "checkpoints")
    if wanted == NEWEST:
        saved = found.newest(run.path / "checkpoints")
        path = saved.path if saved else None
    else:
        path = next((one.path for one in there if wanted in (one.path.name, str(one.step))), None)
        if path and (problem := seal.check(path, contents=True)):
            raise ConfigError(f"{path}: not a whole checkpoint: {problem}.")
    if path is None:
        names = ", ".join(one.path.name for one in there) or "none"
        raise ConfigError(f"--checkpoint {wanted}: {run.path} has no such whole checkpoint. There: {names}.")
    for name, file in _below(path):
        if file.suffix in (".json", ".toml") and _read(file, secrets) != file.read_bytes():
            raise ConfigError(f"{path / name} holds what looks like a password or token; pack without --checkpoint.")
    return path


def _sources(run: RunFolder, secrets: Secrets) -> tuple[dict[str, str], dict[str, bytes | Path]]:
    """Plugin → its file in the pack, and the files, of plugins that are in no package's release."""
    places: dict[str, str] = {}
    files: dict[str, bytes | Path] = {}
    for one in run.plugins:
        ref = PluginRef(one["name"], one["distribution"], one["version"], one.get("object", ""))
        if not ref.object or not (ref.distribution in ("", NO_DISTRIBUTION) or ref.object.startswith(f"{CONTRIB}.")):
            continue
        found = source_files(ref)
        if not found or fingerprint(ref) != one["hash"]:
            log.warning("Plugin %r: its source is gone or has changed since the run, and is not packed.", ref.name)
            continue
        for module, file in found.items():
            if line := secrets.line(file.read_text(encoding="utf-8", errors="replace")):
                raise ConfigError(f"{file}:{line}: this looks like a password or token; take it out of the code first.")
            name = module.replace(".", "/") + ("/__init__.py" if file.name == "__init__.py" else ".py")
            files[place := f"sources/{ref.name}/{name}"] = file.read_bytes()
            if file == ref.file:
                places[ref.name] = place
    return places, files


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []


def _below(folder: Path) -> list[tuple[str, Path]]:
    return [(file.relative_to(folder).as_posix(), file) for file in _files(folder)]

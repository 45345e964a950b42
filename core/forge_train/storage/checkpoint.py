"""Checkpoints: one fresh folder per step, whole or invisible, verified before it replaces anything.

A checkpoint holds tensors (torch.distributed.checkpoint), `state.json` (everything else), the run's `config.toml` and
`plugins.json`, and `manifest.json` with the size and sha256 of every file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, ForgeError
from ..processes.distributed import DistributedContext
from . import dcp
from .run import write_json, write_whole
from .state import join, split

log = logging.getLogger("forge_train")

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})$")


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk."""

    path: Path
    step: int
    bytes: int


def save(folder: Path, step: int, state: Mapping[str, Any], dist: DistributedContext, *, beside: list[Path]) -> Saved:
    """Write `folder/step-…`, and have `folder/latest` name it.

    Args:
        folder: the run's `checkpoints/`.
        step: the optimizer step it is of.
        state: tensors and JSON, as `forge_train.storage.state` takes it apart.
        dist: who writes.
        beside: files and folders to put into it (the configuration, the list of plugins, the tokenizer).

    Raises:
        ForgeError: if the disk refuses; earlier checkpoints stay as they are.
    """
    if dist.main:
        for left in folder.glob(".step-*"):  # by a process that was killed while it saved or pruned
            shutil.rmtree(left, ignore_errors=True)
    return write(folder / f"step-{step:08d}", step, state, dist, beside=beside, latest=folder / "latest")


def write(
    target: Path,
    step: int,
    state: Mapping[str, Any],
    dist: DistributedContext,
    *,
    beside: list[Path],
    latest: Path | None = None,
    contents: Callable[[str], Tensor] | None = None,
) -> Saved:
    """Write one checkpoint so that it appears whole or not at all; see `save`.

    Args:
        target: its folder.
        step: see `save`, as for `state`, `dist` and `beside`.
        latest: the file that names the newest checkpoint, if there is one.
        contents: gives a tensor by its name. The tensors in `state` then only describe them (on the meta device), and
            there is never more than a few of them in memory.

    Raises:
        ForgeError: if the disk refuses.
    """
    part = target.with_name(f".{target.name}.partial")
    try:
        if dist.main:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        dist.barrier()
        tensors: dict[str, Tensor] = {}
        rest = {key: split(value, key, tensors) for key, value in state.items()}
        dcp.write(part, tensors, alone=dist.world == 1, contents=contents)
        if dist.main:
            write_json(part / "state.json", {"format": FORMAT, "step": step, **rest})
            for path in beside:
                shutil.copytree(path, part / path.name) if path.is_dir() else shutil.copyfile(path, part / path.name)
            size = _seal(part)
            if problem := check(part, contents=True):
                raise ForgeError(f"{target}: what was saved can't be read back: {problem}.")
            _commit(part, target)
            if latest is not None:
                write_whole(latest, f"{target.name}\n")
        dist.barrier()
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise _refused(target, error) from error
    return Saved(target, step, size if dist.main else 0)


def _commit(part: Path, target: Path) -> None:
    """Give a finished folder its name; one that is there already (a damaged one, say) goes only then."""
    gone = _aside(target)
    if target.exists():
        target.replace(gone)
    part.replace(target)
    _sync(target.parent)
    shutil.rmtree(gone, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.removed")


def _refused(target: Path, error: OSError) -> ForgeError:
    newest = next((saved.path.name for saved in found(target.parent) if not check(saved.path)), None)
    kept = f"The newest whole checkpoint is {newest}." if newest else "There is no earlier checkpoint."
    return ForgeError(f"{target}: can't save the checkpoint: {error.strerror or error}. {kept}")


def newest(folder: Path) -> Saved | None:
    """The newest whole checkpoint; newer ones that are not whole are named in a warning."""
    for saved in found(folder):
        problem = check(saved.path)
        if not problem:
            return saved
        log.warning("%s is not whole (%s); falling back to the checkpoint before it.", saved.path, problem)
    return None


def found(folder: Path) -> list[Saved]:
    """Checkpoints of a run, newest first, whole or damaged; what was never finished has another name."""
    paths = [(path, match) for path in folder.glob("step-*") if (match := _NAME.match(path.name))]
    return [
        Saved(path, int(match.group(1)), sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
        for path, match in sorted(paths, key=lambda pair: int(pair[1].group(1)), reverse=True)
        if path.is_dir()
    ]


def check(path: Path, *, contents: bool = False) -> str:
    """What is wrong with a checkpoint, in a phrase; empty if nothing is.

    Args:
        path: the checkpoint.
        contents: whether to read every file and compare hashes, not only sizes.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest["files"].items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}"
            if contents and _sha256(file) != expected["sha256"]:
                return f"{name} has other contents than were saved"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} can't be read"
    return ""


def prune(folder: Path, keep: int, keep_every: int) -> Iterator[Saved]:
    """Remove all but the newest `keep` whole checkpoints and those whose step is a multiple of `keep_every`."""
    whole = [saved for saved in found(folder) if not check(saved.path)]
    for saved in whole[keep:]:
        if keep_every and saved.step % keep_every == 0:
            continue
        gone = _aside(saved.path)
        saved.path.replace(gone)  # a checkpoint is never seen half removed
        shutil.rmtree(gone, ignore_errors=True)
        yield saved


def whole(path: Path) -> Path:
    """The checkpoint that a path means: itself, or a run's newest whole one.

    Raises:
        ConfigError: if there is none there.
    """
    if (path / "checkpoints").is_dir():
        saved = newest(path / "checkpoints")
        if saved is None:
            raise ConfigError(f"{path}: this run has no whole checkpoint yet.")
        return saved.path
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such run or checkpoint.")
    if (path / "config.json").is_file() and not (path / MANIFEST).is_file():
        raise ConfigError(
            f"{path} is in Hugging Face layout. Make a checkpoint of it first: forge checkpoint import {path} NEW"
        )
    if not any((path / name).exists() for name in (MANIFEST, "state.json", ".metadata")):
        raise ConfigError(f"{path} is neither a run nor a checkpoint.")
    if problem := check(path):
        raise ConfigError(f"{path}: not a whole checkpoint: {problem}.")
    return path


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's `state.json`, with its tensors still only named.

    Raises:
        ConfigError: if it was written in a format this forge does not know.
    """
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        found = state.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a checkpoint of forge: state.json can't be read.") from error
    if found != FORMAT:
        raise ConfigError(f"{path}: checkpoint format {found!r}; this forge reads {FORMAT}.")
    return state


def shapes(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name → global shape and dtype of every tensor in a checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load(path: Path, like: Mapping[str, Tensor], dist: DistributedContext, *, only: str = "") -> dict[str, Any]:
    """Read a checkpoint's state.

    Args:
        path: a whole checkpoint.
        like: name → tensor to fill in place (this rank's shard, if it is one). Others are made here; those of the
            optimizer are sharded as the parameter they belong to if they have its shape.
        dist: who reads.
        only: read tensors whose name begins with this.
    """
    state = read_state(path)
    targets: dict[str, Tensor] = {}
    for name, (shape, dtype) in shapes(path).items():
        if name.startswith(only):
            targets[name] = like[name] if name in like else _place(name, shape, dtype, like)
    dcp.read(path, targets, alone=dist.world == 1)
    return {key: join(value, targets) for key, value in state.items()} if not only else {"tensors": targets}


def _place(name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Mapping[str, Tensor]) -> Tensor:
    if name.startswith("optimizer.state."):
        parameter = like.get("model." + name.removeprefix("optimizer.state.").rpartition(".")[0])
        if parameter is not None and tuple(parameter.shape) == shape:
            return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(shape, dtype=dtype)


def _seal(path: Path) -> int:
    """Write the manifest, and have everything on disk; the bytes of all files."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    entries, total = {}, 0
    for file in files:
        with file.open("rb") as data:
            os.fsync(data.fileno())
        size = file.stat().st_size
        entries[str(file.relative_to(path))] = {"bytes": size, "sha256": _sha256(file)}
        total += size
    write_json(path / MANIFEST, {"files": entries})
    for folder in {file.parent for file in files} | {path}:
        _sync(folder)
    return total


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Checkpoints: one fresh folder per step, whole or invisible, verified before it replaces anything.

It holds tensors (torch.distributed.checkpoint), `state.json` with everything else, the run's `config.toml` and
`plugins.json`, and `manifest.json` with the size and sha256 of each.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from ..ground import disk
from ..ground.errors import ConfigError, ForgeError
from ..ground.files import remove_remains, write_json, write_whole
from ..processes.distributed import DistributedContext
from . import dcp
from .manifest import FORMAT, MANIFEST, NAME, NEEDED, NEWER
from .reading import load as load  # noqa: PLC0414  # what this module offers too
from .reading import read_state as read_state  # noqa: PLC0414
from .reading import shapes as shapes  # noqa: PLC0414
from .reading import unusable
from .seal import ALONE, moved, seal, sync, verify
from .seal import check as check  # noqa: PLC0414
from .tree import merged, split

log = logging.getLogger("forge_train")


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
        remove_remains(folder)
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
    editable: Sequence[str] = (),
) -> Saved:
    """Write one checkpoint so that it appears whole or not at all; see `save`.

    Args:
        target: its folder.
        step: see `save`, as for `state`, `dist` and `beside`.
        latest: the file that names the newest checkpoint, if there is one.
        contents: gives a tensor by its name. The tensors in `state` then only describe them (on the meta device), and
            there is never more than a few of them in memory.
        editable: files beside the tensors that are meant to be edited.

    Raises:
        ForgeError: on every process, if the disk refuses.
    """
    part = target.with_name(f".{target.name}.partial")
    tensors: dict[str, Tensor] = {}
    rest = {key: split(value, key, tensors) for key, value in state.items()}
    try:
        rest = merged(dist.gather_stages(rest))
        dist.on_main(lambda: _make_anew(part))
        dcp.write(part, tensors, alone=dist.world == 1, contents=contents)
        dist.on_main(lambda: _describe(part, {"format": FORMAT, "step": step, **rest}, beside))
        size = seal(part, step, dist, editable=editable)
        if problem := verify(part, dist):
            raise ForgeError(f"{target}: what was saved can't be read back: {problem}.")
        dist.on_main(lambda: _commit(part, target, latest))
    except (OSError, ForgeError) as error:
        if dist.main:
            shutil.rmtree(part, ignore_errors=True)
        dist.barrier()  # so that there is room for what the run still has to say
        if isinstance(error, ForgeError):
            raise
        refusal = error
        raise dist.on_main(lambda: _refused(target, refusal)) from error
    return Saved(target, step, size)


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _describe(part: Path, state: Mapping[str, Any], beside: list[Path]) -> None:
    """What lies beside the tensors."""
    write_json(part / "state.json", state)
    for path in beside:
        shutil.copytree(path, part / path.name) if path.is_dir() else shutil.copyfile(path, part / path.name)


def _commit(part: Path, target: Path, latest: Path | None) -> None:
    """Give a finished folder its name; one that is there already (a damaged one, say) goes only then."""
    gone = _aside(target)
    if target.exists():
        target.replace(gone)
    part.replace(target)
    moved(part, target)
    sync(target.parent)
    shutil.rmtree(gone, ignore_errors=True)
    if latest is not None:
        write_whole(latest, f"{target.name}\n")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.removed")


def _refused(target: Path, error: OSError) -> ForgeError:
    whole = next((saved.path.name for saved in found(target.parent) if not verify(saved.path)), None)
    kept = f" The newest whole checkpoint is {whole}." if whole else " There is no earlier checkpoint."
    return disk.refused(target, error, "can't save the checkpoint:", kept)


def newest(folder: Path, dist: DistributedContext = ALONE) -> Saved | None:
    """The newest whole checkpoint, every file of which was read; newer ones that are not whole are named in a warning.

    Args:
        folder: a run's `checkpoints/`.
        dist: the processes that read them together, all of which call this.
    """
    return next(_whole(folder, dist, warn=True), None)


def _whole(folder: Path, dist: DistributedContext, *, warn: bool = False) -> Iterator[Saved]:
    """The whole checkpoints, newest first, each verified when it is its turn."""
    for saved in dist.on_main(lambda: found(folder)):
        problem = verify(saved.path, dist)
        if not problem:
            yield saved
        elif warn and problem.startswith(NEWER):
            raise unusable(saved.path, problem)
        elif warn and dist.main:
            log.warning("%s is not whole (%s); falling back to the checkpoint before it.", saved.path, problem)


def found(folder: Path) -> list[Saved]:
    """Checkpoints of a run, newest first, whole or damaged; what was never finished has another name."""
    paths = [(path, match) for path in folder.glob("step-*") if (match := NAME.match(path.name))]
    return [
        Saved(path, int(match.group(1)), sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
        for path, match in sorted(paths, key=lambda pair: int(pair[1].group(1)), reverse=True)
        if path.is_dir()
    ]


def prune(folder: Path, keep: int, keep_every: int, dist: DistributedContext = ALONE) -> Iterator[Saved]:
    """Remove all but the newest `keep` whole checkpoints and those whose step is a multiple of `keep_every`.

    A damaged one is not counted, and stays where it is newer than those. The main process removes, and tells what.
    """
    steps = dist.on_main(lambda: [saved.step for saved in found(folder)])
    if len(steps) <= keep:
        return
    kept = list(islice(_whole(folder, dist), keep))
    if len(kept) < keep or not dist.main:
        return
    for saved in found(folder):
        if saved.step >= kept[-1].step or (keep_every and saved.step % keep_every == 0):
            continue
        gone = _aside(saved.path)
        saved.path.replace(gone)  # a checkpoint is never seen half removed
        shutil.rmtree(gone, ignore_errors=True)
        yield saved


def resolve(path: Path, dist: DistributedContext = ALONE) -> Path:
    """The checkpoint that a path means: itself, or a run's newest whole one. Every file of it was read.

    Args:
        path: a run, or a checkpoint.
        dist: the processes that read it together, all of which call this.

    Raises:
        ConfigError: if there is none there.
    """
    if dist.on_main(lambda: _is_run(path)):
        saved = newest(path / "checkpoints", dist)
        if saved is None:
            raise ConfigError(f"{path}: this run has no whole checkpoint.")
        return saved.path
    if problem := verify(path, dist):
        raise unusable(path, problem)
    return path


def _is_run(path: Path) -> bool:
    """Whether a path is a run; else it is a checkpoint, whole or not. It is an error if it is neither."""
    if (path / "checkpoints").is_dir():
        return True
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such run or checkpoint.")
    if (path / "config.json").is_file() and not (path / MANIFEST).is_file():
        raise ConfigError(
            f"{path} is in Hugging Face layout. Make a checkpoint of it first: forge checkpoint import {path} NEW"
        )
    if not any((path / name).exists() for name in (MANIFEST, *NEEDED)):
        raise ConfigError(f"{path} is neither a run nor a checkpoint.")
    return False

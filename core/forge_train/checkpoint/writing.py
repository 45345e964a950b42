"""Writing checkpoints: whole or invisible, verified before they replace anything.

It goes in two halves. `stage` is what training waits for: ranks agree on who writes what, and the state is copied if
training continues meanwhile. `commit` writes, hashes, verifies and renames, in any thread.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from ..base.errors import ForgeError
from ..base.files import check_new, put, refused, remove_remains, write_json, write_whole
from ..base.format import format_bytes
from ..mesh.distributed import DistributedContext
from ..store.manifest import FORMAT
from ..store.save_plan import Copies, MakeFiles, Plan, Shards, choose
from ..store.tree import merged, split
from .found import Saved, found, is_kept, name_latest, remove, whole
from .reading import read_state
from .seal import ALONE, moved, seal, sync, verify


@dataclass(frozen=True)
class Staged:
    """A checkpoint that only has to be written."""

    target: Path
    step: int
    state: Any
    """Everything but the tensors, as JSON."""
    shards: Shards


def stage(
    target: Path,
    step: int,
    state: Mapping[str, Any],
    dist: DistributedContext,
    *,
    contents: Callable[[str], Tensor] | None = None,
    copies: Copies | None = None,
    before: Plan | None = None,
    files: MakeFiles | None = None,
) -> Staged:
    """Take a state apart, and decide who writes what.

    Args:
        target: the checkpoint's folder.
        step: the optimizer step it is of.
        state: tensors and JSON, as `forge_train.checkpoint.state` takes it apart.
        dist: who writes.
        contents: gives a tensor by its name. The tensors in `state` then only describe them (on the meta device), and
            there is never more than a few of them in memory.
        copies: where to copy the tensors, so that what follows leaves the checkpoint as it is; the memory of copies
            that are there is used again.
        before: the plan of the run's checkpoint before.
        files: makes the files of full tensors, if there are to be some.

    Raises:
        ForgeError: on every process, if the disk has no room for it.
    """
    tensors: dict[str, Tensor] = {}
    rest = {key: split(value, key, tensors) for key, value in state.items()}
    shards = choose(tensors, dist, contents=contents, before=before, files=files)
    dist.on_main(lambda: _check_room(target, shards.plan.bytes))
    if copies is not None:
        shards.copy(copies)
    return Staged(target, step, merged(dist.gather_stages(rest)), shards)


def commit(
    staged: Staged,
    dist: DistributedContext,
    *,
    beside: list[Path],
    latest: Path | None = None,
    editable: Sequence[str] = (),
    replace: bool = True,
) -> Saved:
    """Write what was staged so that it appears whole or not at all.

    Args:
        staged: the checkpoint.
        dist: who writes.
        beside: files and folders to put into it (the configuration, the list of plugins, the tokenizer).
        latest: the file that names the newest checkpoint, if there is one.
        editable: files beside the tensors that are meant to be edited.
        replace: whether a folder that is there already (a damaged checkpoint, say) may go.

    Raises:
        ForgeError: on every process, if the disk refuses.
    """
    target, step = staged.target, staged.step
    part = target.with_name(f".{target.name}.partial")
    try:
        dist.on_main(lambda: _make_anew(part))
        hashes = staged.shards.write(part, dist)
        dist.on_main(lambda: _describe(part, {"format": FORMAT, "step": step, **staged.state}, beside))
        size = seal(part, step, dist, editable=editable, known=hashes)
        if problem := verify(part, dist, from_disk=True):
            raise ForgeError(f"{target}: what was saved can't be read back: {problem}.")
        dist.on_main(lambda: read_state(part))  # a plugin's state may be what no resume would take
        dist.on_main(lambda: _publish(part, target, latest, replace=replace))
    except (OSError, ForgeError) as error:
        if dist.main:
            shutil.rmtree(part, ignore_errors=True)
        dist.barrier()  # so that there is room for what the run still has to say
        if isinstance(error, ForgeError):
            raise
        refusal = error
        raise dist.on_main(lambda: _refused(target, refusal)) from error
    return Saved(target, step, size)


def _check_room(target: Path, size: int) -> None:
    """Raise what tells how much the checkpoint takes, where the disk has less."""
    here = target.absolute()
    while not here.exists():
        here = here.parent
    if shutil.disk_usage(here).free < size:
        raise _refused(target, OSError(errno.ENOSPC, f"it takes {format_bytes(size)}"))


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _describe(part: Path, state: Mapping[str, Any], beside: list[Path]) -> None:
    """Write the files beside the tensors."""
    write_json(part / "state.json", state)
    for path in beside:
        shutil.copytree(path, part / path.name) if path.is_dir() else shutil.copyfile(path, part / path.name)


def _publish(part: Path, target: Path, latest: Path | None, *, replace: bool) -> None:
    """Give a finished folder its name; one that is there already goes only then."""
    if not replace:
        check_new(target)
    gone = put(part, target)
    moved(part, target)
    sync(target.parent)
    shutil.rmtree(gone, ignore_errors=True)
    if latest is not None:
        write_whole(latest, f"{target.name}\n")


def _refused(target: Path, error: OSError) -> ForgeError:
    last = next((saved.path.name for saved in found(target.parent) if not verify(saved.path)), None)
    kept = f" The newest whole checkpoint is {last}." if last else " There is no earlier checkpoint."
    return refused(target, error, "can't save the checkpoint:", kept)


def prune(
    folder: Path, keep: int, keep_every: int, dist: DistributedContext = ALONE, *, spared: Set[int] = frozenset()
) -> Iterator[Saved]:
    """Remove all but the newest `keep` whole checkpoints and those whose step is a multiple of `keep_every`, or spared.

    A damaged one is not counted, and stays where it is newer than those. The main process removes, and tells what.
    """
    old = dist.on_main(lambda: [one for one in found(folder)[keep:] if not is_kept(one.step, keep_every, spared)])
    if not old:
        return
    kept = list(islice(whole(folder, dist), keep))
    if len(kept) < keep or not dist.main:
        return
    for saved in found(folder):
        if saved.step < kept[-1].step and not is_kept(saved.step, keep_every, spared):
            remove(saved)
            yield saved


def repair(folder: Path, keep: int, keep_every: int, *, spared: Set[int] = frozenset()) -> Iterator[Saved]:
    """Do what a process had still to do that was killed behind a save; the main process of a run calls this.

    Args:
        folder: the run's `checkpoints/`, whose `latest` then names the newest whole one.
        keep: see `prune`, as for `keep_every` and `spared`.

    Returns:
        Each checkpoint that is removed.
    """
    remove_remains(folder)
    if (saved := next(whole(folder, ALONE), None)) is not None:
        name_latest(folder, saved)
        yield from prune(folder, keep, keep_every, spared=spared)

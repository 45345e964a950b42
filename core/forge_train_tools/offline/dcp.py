"""Checkpoints of torch.distributed.checkpoint (DCP): written from Forge's, and turned into Forge's.

torch reads and writes its pickles here, in a process that was asked for it, and nowhere else in Forge: tensors with
`weights_only`. Their index is read without calling anything that it names.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError, describe
from forge_train.base.files import check_new, load_json, regular_size
from forge_train.base.format import format_list
from forge_train.checkpoint import checkpoint
from forge_train.checkpoint.reading import state_problem
from forge_train.checkpoint.seal import ALONE
from forge_train.checkpoint.writing import commit, stage
from forge_train.store.manifest import (
    DCP_INDEX,
    EDITABLE,
    FIRST,
    FORMAT,
    LARGEST,
    MANIFEST,
    NEWER,
    SHARDS,
    STATE,
    hash_names,
    hash_of,
    is_hash,
    other_format,
    way_out,
)
from forge_train.store.shards import whole
from forge_train.store.tensors import read_range
from forge_train.store.tree import MODEL, join, naming_problem
from forge_train_kit import foreign
from forge_train_kit.model_files import FOLDER
from forge_train_kit.new_folder import claimed
from forge_train_kit.stored import weights_digest

from .dcp_folder import Folder
from .hf_files import Exchanged, appearing
from .regular import check_regular, copy_regular

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

BESIDE = (EDITABLE, "plugins.json", FOLDER)
"""Contents of a checkpoint next to its tensors and its state."""


def is_dcp(path: Path) -> bool:
    """Return True if torch.distributed.checkpoint wrote a folder, as it did for older checkpoints of Forge."""
    return (path / DCP_INDEX).is_file()


def export_dcp(path: Path, target: Path) -> Exchanged:
    """Write a checkpoint as DCP does, under the same names, with its state beside it.

    Args:
        path: a run, which means its newest whole checkpoint, or a checkpoint.
        target: the folder, which must not exist yet.

    Raises:
        ConfigError: if there is no whole checkpoint, or the target is in use.
        ForgeError: if the disk reports an error.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
    from torch.distributed.checkpoint.metadata import StorageMeta

    path = foreign.resolve(path)
    shapes = checkpoint.shapes(path)

    class Planner(DefaultSavePlanner):
        """Reads each tensor when it is its turn."""

        def lookup_object(self, index: MetadataIndex) -> Tensor:
            return read_range(path, index.fqn, whole(shapes[index.fqn][0]))

    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            return StorageMeta()  # without the path: the folder may be moved

    described = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    with appearing(target) as part, _alone():
        # torch's writer (2.13) keeps every tensor of a file until the file is written: each gets a file of its own.
        writer = Writer(part, single_file_per_rank=False, per_thread_copy_ahead=0)
        save(described, storage_writer=writer, planner=Planner(), no_dist=True)
        for name in (STATE, *BESIDE):
            if (path / name).exists():
                copy_regular(path / name, part / name)
    files = tuple(sorted(file.name for file in target.iterdir()))
    return Exchanged(target, _parameters(shapes), files)


def import_dcp(source: Path, target: Path) -> Exchanged:
    """Make a checkpoint from a DCP folder; tensors pass through memory one at a time.

    A folder that Forge wrote gives the whole checkpoint again. Of any other, the tensors outside its optimizer become
    a checkpoint of weights, from which `train.init_from` starts.

    Args:
        source: the folder.
        target: the checkpoint's folder, which must not exist yet.

    Raises:
        ConfigError: if the folder is damaged, or holds anything but tensors and plain values.
        ForgeError: if the disk reports an error.
    """
    check_new(target)
    _check_regular(source)
    folder, notes = Folder(source), tuple[str, ...]()
    editable = _compare_hashes(source)
    tensors = folder.tensors
    if (source / STATE).is_file():
        state = _state_of(source, tensors)
    else:
        names = folder.choose_weights()
        tensors = {f"{MODEL}{name}": tensors[own] for name, own in names.items()}
        weights = {name: tensors[f"{MODEL}{name}"] for name in names}
        made = {"from": str(source.absolute())}
        state = {"model": weights, "progress": {"step": 0, "tokens": 0}, "config": {}, "enabled": [], "imported": made}
        if left := sorted({*folder.index.tensors, *folder.index.others} - set(names.values())):
            notes = (f"{format_list(left, 8)}: left out.",)
        notes = (*notes, f"Start from its weights with train.init_from={target}; train.init_map renames them.")
    step = state.pop("step", 0)
    beside = [source / name for name in BESIDE if (source / name).exists()]
    with claimed(target) as place:
        try:
            staged = stage(place, step, state, ALONE, contents=folder.read)
            commit(staged, ALONE, beside=beside, editable=editable, replace=False)
        finally:
            shutil.rmtree(place.with_name(f".{place.name}.partial"), ignore_errors=True)
    shapes = {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()}
    return Exchanged(target, _parameters(shapes), tuple(sorted(folder.files)), notes)


@contextmanager
def _alone() -> Iterator[None]:
    """Without torch's warning that one process is alone; and the error itself instead of torch's
    `CheckpointException`, which is no `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            failed = [failure for failure, _ in error.failures.values()]
            raise next((one for one in failed if isinstance(one, OSError)), failed[0]) from error


def _check_regular(source: Path) -> None:
    """Refuse links and special files where files are read or copied: they may lead anywhere, or never end."""
    for name in (DCP_INDEX, STATE, MANIFEST, *BESIDE):
        if os.path.lexists(source / name):
            try:
                check_regular(source / name)
            except OSError as error:
                raise ConfigError(f"{error.filename}: can't be read: {error.strerror}.") from error


def _parameters(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(torch.Size(shape).numel() for name, (shape, _) in shapes.items() if name.startswith(MODEL))


# -- older checkpoints of Forge ---------------------------------------------------------------------------------------


def _state_of(source: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of a checkpoint, with its tensors on the meta device."""
    try:
        saved = load_json(source / STATE, most=LARGEST[STATE])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source / STATE}: can't be read: {describe(error).rstrip('.')}.") from error
    if not isinstance(saved, dict):
        raise ConfigError(f"{source / STATE}: is no table.")
    if (problem := other_format(number := saved.pop("format", FORMAT))).startswith(NEWER):
        raise ConfigError(f"{source}: {problem}. {way_out(problem, source)}")
    if type(number) is not int or number < 1:
        raise ConfigError(f"{source / STATE}: is not as forge writes it: 'format' is {str(number)[:40]!r}.")
    if problem := state_problem(saved):
        raise ConfigError(f"{source / STATE}: is not as forge writes it: {problem}.")
    if problem := naming_problem(saved, tensors):
        raise ConfigError(f"{source / STATE}: {problem}.")
    if base := saved.get("base"):
        saved["base"] = {**base, "digest": _digest_of_base(source, base)}
    if (source / MANIFEST).is_file():
        saved["imported"] = {"from": str(source.absolute()), "digest": old_digest(source)}
    state: dict[str, Any] = join(saved, tensors)
    return state


def _hashes(source: Path) -> tuple[dict[str, tuple[int, str]], str, tuple[str, ...]]:
    try:
        table = load_json(source / MANIFEST, most=LARGEST[MANIFEST])
        if not is_hash(algorithm := table.get("hash", FIRST)):
            raise ValueError(f"it names the hash {str(algorithm)[:40]!r}; this forge knows {hash_names()}")
        files = {name: (one["bytes"], one[algorithm]) for name, one in table["files"].items()}
        editable = table.get("editable", [])
        if any(name != EDITABLE for name in editable):
            raise ValueError(f"'editable' holds something else than {EDITABLE}")
        for name in files:
            if not name.isprintable() or Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"it names {name[:100]!r}, which is not in this folder")
        return files, algorithm, tuple(editable)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source / MANIFEST}: can't be read: {describe(error).rstrip('.')}.") from error


def _compare_hashes(source: Path) -> tuple[str, ...]:
    """Compare an older checkpoint with its manifest, if it has one; the names of files that may be edited."""
    if not (source / MANIFEST).is_file():
        return ()
    files, algorithm, editable = _hashes(source)
    if lacking := next((name for name in editable if not (source / name).is_file()), None):
        raise ConfigError(f"{source}: not a whole checkpoint: {lacking} is missing.")
    for name, (size, expected) in files.items():
        if name == EDITABLE:
            continue
        try:
            for parent in Path(name).parents:
                if parent != Path() and (source / parent).is_symlink():
                    raise OSError(errno.ELOOP, "it is in a folder that is a link, and links are not followed")
            if regular_size(source / name) != size:
                raise ConfigError(f"{source}: not a whole checkpoint: {name[:100]!r} is not as it was saved.")
            with (source / name).open("rb") as data:
                found = hash_of(data, algorithm)
        except OSError as error:
            raise ConfigError(f"{source}: {name} can't be read: {error.strerror or error}.") from error
        if found != expected:
            raise ConfigError(f"{source}: not a whole checkpoint: {name} has other contents than were saved.")
    return editable


def old_digest(source: Path) -> str:
    """The hash that a checkpoint of format 1 or 2 has as the base of a partial one."""
    ends = (".distcp", SHARDS)
    files = sorted((n, one) for n, (_, one) in _hashes(source)[0].items() if n == DCP_INDEX or n.endswith(ends))
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _digest_of_base(source: Path, base: Mapping[str, str]) -> str:
    """The hash of the checkpoint beneath a partial one, once it was imported to the place of the old one."""
    try:
        beneath = foreign.resolve(Path(base["path"]))
        now, imported = weights_digest(beneath), checkpoint.read_state(beneath).get("imported", {})
        if base["digest"] in (now, imported.get("digest")):
            return now
    except ConfigError:
        pass
    raise ConfigError(
        f"{source}: holds a part of the weights, and the others are those of {base['path']}. Import that one first, "
        "move the result to its place, and import this one again."
    )

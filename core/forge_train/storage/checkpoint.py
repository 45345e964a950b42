"""Checkpoints: one fresh folder per step, whole or invisible, verified before it replaces anything.

It holds tensors (torch.distributed.checkpoint), `state.json` with everything else, the run's `config.toml` and
`plugins.json`, and `manifest.json` with the size and sha256 of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ground.errors import ConfigError
from ..ground.strict_json import loads
from ..processes.distributed import DistributedContext
from . import dcp
from .found import Saved as Saved  # noqa: PLC0414  # what this module offers too
from .found import found as found  # noqa: PLC0414
from .found import newest as newest  # noqa: PLC0414
from .metadata import FILE, read_index
from .placement import place
from .seal import ALONE, MANIFEST, verify
from .seal import check as check  # noqa: PLC0414
from .tree import join, named, without
from .writing import FORMAT
from .writing import prune as prune  # noqa: PLC0414
from .writing import save as save  # noqa: PLC0414
from .writing import write as write  # noqa: PLC0414


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
        raise ConfigError(f"{path}: not a whole checkpoint: {problem}. {_way_out(path)}")
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
    if not any((path / name).exists() for name in (MANIFEST, "state.json", FILE)):
        raise ConfigError(f"{path} is neither a run nor a checkpoint.")
    return False


def _way_out(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    if (path.parent.parent / "plugins.json").is_file():
        return f"Name the run instead, which takes its newest whole one: {path.parent.parent}"
    try:
        editable = json.loads((path / MANIFEST).read_text(encoding="utf-8")).get("editable", [])
    except (OSError, ValueError, AttributeError):
        editable = []
    may = f" (only {', '.join(editable)} may be edited)" if editable else ""
    return f"Put the file back as it was{may}, or make the checkpoint again."


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's `state.json`, with its tensors still only named.

    Raises:
        ConfigError: if it was written in a format this forge does not know.
    """
    try:
        state: dict[str, Any] = loads((path / "state.json").read_text(encoding="utf-8"))
        found = state.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a checkpoint of forge: state.json can't be read.") from error
    if found != FORMAT:
        raise ConfigError(f"{path}: checkpoint format {found!r}; this forge reads {FORMAT}.")
    return state


def shapes(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name → global shape and dtype of every tensor in a checkpoint."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = read_index(path).state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load(
    path: Path,
    like: Mapping[str, Tensor],
    dist: DistributedContext,
    *,
    only: str = "",
    elsewhere: Set[str] = frozenset(),
) -> dict[str, Any]:
    """Read a checkpoint's state.

    Args:
        path: a whole checkpoint.
        like: name → tensor to fill in place (this rank's shard, if it is one). Others are made here; those of the
            optimizer are spread as the parameter they belong to.
        dist: who reads.
        only: read tensors whose name begins with this.
        elsewhere: parameters and buffers on other stages of a pipeline; what is under their names is left out.
    """
    here = set(named(state := without(read_state(path), elsewhere)))
    parameters = {name.removeprefix("model."): tensor for name, tensor in like.items() if name.startswith("model.")}
    odd = state.get("odd", {"plain": [], "spread": []})
    targets = {
        name: like[name] if name in like else place(name, shape, dtype, parameters, odd)
        for name, (shape, dtype) in shapes(path).items()
        if name in here and name.startswith(only)
    }
    dcp.read(path, targets, alone=dist.world == 1)
    return {key: join(value, targets) for key, value in state.items()} if not only else {"tensors": targets}

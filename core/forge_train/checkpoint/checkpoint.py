"""Checkpoints: one fresh folder per step, whole or invisible, verified before it replaces anything.

It holds tensors (safetensors files and their index), `state.json` with everything else, the run's `config.toml` and
`plugins.json`, and `manifest.json` with the size and hash of each.
"""

from __future__ import annotations

from pathlib import Path

from ..base.errors import ConfigError
from ..mesh.distributed import DistributedContext
from ..store.manifest import MANIFEST, NEEDED
from .found import Saved as Saved  # noqa: PLC0414  # what this module offers too
from .found import found as found  # noqa: PLC0414
from .found import newest as newest  # noqa: PLC0414
from .found import remove as remove  # noqa: PLC0414
from .reading import load as load  # noqa: PLC0414
from .reading import read_state as read_state  # noqa: PLC0414
from .reading import shapes as shapes  # noqa: PLC0414
from .reading import unusable
from .seal import ALONE, verify
from .seal import check as check  # noqa: PLC0414
from .writing import prune as prune  # noqa: PLC0414


class NoCheckpointError(ConfigError):
    """A path is neither a run nor a checkpoint."""


def resolve(path: Path, dist: DistributedContext = ALONE) -> Path:
    """The checkpoint that a path means: itself, or a run's newest whole one. Every file of it was read.

    Args:
        path: a run, or a checkpoint.
        dist: the processes that read it together, all of which call this.

    Raises:
        NoCheckpointError: if it is neither.
        ConfigError: if there is none there that is whole.
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
    """Return True for a run, False for a checkpoint, complete or not. Any other path is an error."""
    if (path / "checkpoints").is_dir():
        return True
    if not path.is_dir():
        what = "not a run or a checkpoint" if path.exists() else "there is no such run or checkpoint"
        raise NoCheckpointError(f"{path}: {what}.")
    if not any((path / name).exists() for name in (MANIFEST, *NEEDED)):
        raise NoCheckpointError(f"{path} is neither a run nor a checkpoint.")
    return False

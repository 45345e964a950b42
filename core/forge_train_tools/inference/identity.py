"""Digests of a model: two that differ give other outputs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.mesh.distributed import DistributedContext
from forge_train.plugin.job import Job
from forge_train.store.manifest import hash_of
from forge_train_kit.own_sections import model_plugins
from forge_train_kit.stored import weights_digest

from ..offline.opening import Source


def weights_of(source: Source, dist: DistributedContext) -> str:
    """A digest of a model's weights, the same for a copy of its files.

    That of a checkpoint is in its manifest. The files of a Hugging Face folder are read, a share by each process; the
    weights are then in the system's cache, from which they are loaded.

    Args:
        source: the model.
        dist: all processes.

    Raises:
        ConfigError: a file can't be read.
    """
    if source.saved is not None:
        return weights_digest(source.path)
    files = sorted(file for file in source.path.iterdir() if file.is_file() and not file.name.startswith("."))
    mine = {file.name: _content(file) for file in files[dist.rank :: dist.world]}
    found = sorted(entry for part in dist.gather_objects(mine) for entry in part.items())
    if refused := next((entry for entry in found if isinstance(entry[1], OSError)), None):
        raise ConfigError(f"{source.path / refused[0]}: can't be read: {refused[1]}.")
    return hashlib.sha256(repr(found).encode()).hexdigest()


def values_of(job: Job) -> str:
    """A digest of the values of the plugins that decide what the model computes from its weights."""
    makers = model_plugins(job)
    values = job.config.values(volatile=False).items()
    return hashlib.sha256(repr(sorted((k, v) for k, v in values if k.partition(".")[0] in makers)).encode()).hexdigest()


def _content(file: Path) -> str | OSError:
    try:
        with file.open("rb") as data:
            return hash_of(data)
    except OSError as error:
        return error

"""Resolves addresses, and fetches what `--resume` names by one."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.base.files import plain
from forge_train.checkpoint.found import newest
from forge_train.run.run import is_run, writing
from forge_train.store.manifest import MANIFEST, NAME
from forge_train_kit import model_files

from ..lock import take
from ..new_folder import is_unfinished
from .addresses import address_of
from .copies import bring
from .remote_folder import RemoteFolder
from .store import Store, Stored


@dataclass(frozen=True)
class Place:
    """Content of an address: one checkpoint, or those of a run."""

    store: Store
    checkpoint: Stored | None = None
    """The one that is named."""
    run: str = ""
    """The name of the run, if it is one."""

    def all(self) -> list[Stored]:
        """The checkpoints with a manifest, newest first."""
        return [self.checkpoint] if self.checkpoint else self.store.found()

    def one(self) -> Stored:
        """The checkpoint that is named, or the newest whole one.

        Raises:
            ConfigError: if there is none.
        """
        if (stored := self.checkpoint or next(self.store.newest(), None)) is None:
            raise ConfigError(f"{self.store.address}: this run has no whole checkpoint.")
        return stored


def locate(address: str) -> Place:
    """Resolve an address, or the path of a folder.

    Raises:
        ConfigError: if there is neither a checkpoint nor a run, or it can't be read.
    """
    address = address.rstrip("/")
    parent, _, name = address.rpartition("/")
    names = dict(RemoteFolder(address).entries())
    if MANIFEST in names:
        store = Store(parent or ".")
        return Place(store, store.one(name))
    if "checkpoints" in names:
        return Place(Store(f"{address}/checkpoints"), run=name)
    if any(NAME.match(one) for one in names):
        return Place(Store(address), run=parent.rpartition("/")[2] if name == "checkpoints" else name)
    raise ConfigError(f"{address}: there is no such run or checkpoint.")


def fetched(resume: str, folder: Path) -> str:
    """Return the value of `--resume`, fetching an address and replacing it with the local path.

    Args:
        resume: a path stays as it is, unless it is the folder of a copied run, which is fetched too.
        folder: where run folders are made. A run is created or updated there; a checkpoint goes into a hidden
            subfolder.

    Raises:
        ConfigError: if it does not exist or is damaged, or another process has the run.
    """
    if not (address := address_of(resume)):
        return plain(resume)
    place, target = locate(address), target_of(address, folder)
    if place.run:
        return str(_run(place, target))
    return str(place.store.fetch(place.one(), target, shared=True))


def target_of(address: str, folder: Path) -> Path:
    """Return the path to which `fetched` copies the content of an address.

    Raises:
        ConfigError: if there is neither a checkpoint nor a run, or it can't be read.
    """
    place = locate(address)
    if place.run:
        return folder / place.run
    digest = hashlib.sha256(place.store.address.encode()).hexdigest()[:8]
    return folder / ".fetched" / digest / place.one().name


def _run(place: Place, target: Path) -> Path:
    """A run's folder here, with its newest checkpoint and what makes it a run."""
    if target.exists() and not is_run(target) and not is_unfinished(target):
        raise ConfigError(f"{target}: exists and is not a run; choose another --run-dir.")
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        lock = take(target)
        try:
            saved = newest(target / "checkpoints")
            path, after = (saved.path, saved.step) if saved else (None, -1)
            path = bring([place.store], target / "checkpoints", after=after) or path
            if path is None:
                raise ConfigError(f"{place.store.address}: this run has no whole checkpoint.")
            if not is_run(target):
                if (tokenizer := path / model_files.FOLDER).is_dir():
                    shutil.copytree(tokenizer, target / model_files.FOLDER, dirs_exist_ok=True)
                for name in ("config.toml", "plugins.json"):  # both make it a run
                    shutil.copyfile(path / name, target / name)
        finally:
            lock.release()
    return target

"""Start of a run: its folder, and what it continues from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ..base.errors import ConfigError
from ..config import Config
from .run import is_run, unlocked

if TYPE_CHECKING:
    from ..mesh.distributed import DistributedContext


@dataclass(frozen=True)
class Start:
    """Start of a run: its folder, and what it continues from."""

    dir: Path
    checkpoint: Path | None = None
    """A checkpoint of another run to start from; one of this run is found in its folder."""
    continues: bool = False
    """True if the folder already holds this run."""
    new: bool = False
    """True if the folder is made for this start."""
    notes: tuple[str, ...] = ()
    """Messages for the log about the state in which the folder was found."""
    check_lock: Callable[[], None] = field(default=unlocked, compare=False)
    """Raises a ForgeError if another job took the folder over."""

    def again(self, *, saved: bool) -> Start:
        """The same run, once its processes were lost; `saved` is whether it has a checkpoint of its own."""
        if self.checkpoint is not None and not saved:
            return self
        return Start(self.dir, continues=is_run(self.dir), check_lock=self.check_lock)


Claim: TypeAlias = "Callable[[DistributedContext, Config, Path, str, tuple[str, ...]], AbstractContextManager[Start]]"
"""Processes, configuration, folder of runs, `auto`, `never` or the path of a run or a checkpoint, and plugins to name
→ where the run begins; while the block lasts, the folder is this job's. All processes call it."""


@contextmanager
def claim(
    dist: DistributedContext, config: Config, folder: Path, resume: str, notable: tuple[str, ...] = ()
) -> Iterator[Start]:
    """Take the run of a name or a path, or a new one, without a lock.

    Raises:
        ConfigError: for a path that is no run, and for a folder that is there already.
    """
    listed = resume in ("auto", "never")
    name = config.run.name or "-".join([config.source, *notable, time.strftime("%Y%m%d-%H%M%S")])
    path = folder / name if listed else Path(resume)
    new, continues = dist.on_main(lambda: (not path.exists(), is_run(path) and (bool(config.run.name) or not listed)))
    if not listed and not continues:
        raise ConfigError(f"resume: expected 'auto', 'never' or the path of a run, found {resume!r}.")
    if not new and not (continues and resume != "never"):
        raise ConfigError(f"{path}: exists; choose another run.name or folder.")
    yield Start(path, continues=continues, new=new)

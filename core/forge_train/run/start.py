"""Start of a run: its folder, and what it continues from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from ..base.errors import ConfigError
from ..config import Config, differences
from ..mesh.axes import CONFIGURED, Axis
from ..mesh.layout import Layout
from . import records
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


def changed_layout(checkpoint: Path, saved: Mapping[str, Any], now: Layout) -> str:
    """`dp_shard 2 then, 1 now` for every axis whose size differs from that of the run's last attempt; empty if none
    does, or if the folder does not say it."""
    events = checkpoint.parent.parent / "events.jsonl"
    begun = [one for one in records.read(events, strict=False) if one.get("event") == "run_started"]
    axes = {key.removeprefix("parallel."): size for key, size in saved.items() if key.startswith("parallel.")}
    try:
        others = tuple(Axis(name) for name in axes if name not in CONFIGURED)
        then = Layout.of(SimpleNamespace(**axes, __axes__=others), begun[-1]["world"])
    except (ConfigError, AttributeError, IndexError, KeyError, TypeError):
        return ""
    sizes = (then.axes(), now.axes())
    names = {axis: 1 for layout in sizes for axis in layout}
    changed = differences(*({**names, **layout} for layout in sizes))
    return ", ".join(f"{axis} {before} then, {after} now" for axis, before, after in changed)

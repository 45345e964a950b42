"""Saving a run's state: each checkpoint is on disk before training continues, and the newest of them stay."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, ClassVar

from ..base.errors import ConfigError, during
from ..base.files import remove_remains
from ..checkpoint import checkpoint, found
from ..checkpoint.writing import Staged, commit, prune, repair, stage
from ..config.sections import CheckpointSection
from ..contract.events import CheckpointEvent
from ..mesh.distributed import DistributedContext
from ..plugin import hookspecs
from ..plugin.job import Job
from ..run.run import MODEL_FILES
from ..store.save_plan import Copies, MakeFiles


class Saver:
    """Saves by `checkpoint.every`, and keeps the newest; a subclass (`Setup.saver`) knows more.

    Args:
        job: the run.

    Raises:
        ConfigError: if the configuration asks for more.
    """

    unknown: ClassVar[tuple[str, ...]] = (
        "minutes",
        "early",
        "best",
        "best_is",
        "keep_best",
        "asynchronous",
        "folder",
        "mirror",
    )
    """Keys of [checkpoint] without effect."""

    def __init__(self, job: Job) -> None:
        self._job, self._config = job, job.config.checkpoint
        usual = CheckpointSection()
        for key in self.unknown:
            if getattr(self._config, key) != getattr(usual, key):
                raise ConfigError(f"checkpoint.{key}: this setup saves by checkpoint.every alone; remove the key.")
        self._files = self.files(self._config.format)
        self._plan: Any = None
        self._began = 0.0

    def files(self, form: str) -> MakeFiles | None:
        """Say what writes the model's weights as full tensors, where `checkpoint.format` asks for that.

        Raises:
            ConfigError: if it asks for what this setup does not write.
        """
        if form != "sharded":
            raise ConfigError(f"checkpoint.format: this setup writes no full tensors, as {form!r} asks; set 'sharded'.")
        return None

    def open(self) -> None:
        """Make what saving needs, before the run starts; all processes call this."""
        self.around = hookspecs.around("save", self._job)

    def start(self, step: int) -> None:
        """The run begins after a step: finish what an earlier attempt had still to do."""
        self.undo()
        for gone in self.repaired(step) if self._job.dist.main else ():
            self.tell_pruned(gone)

    def finished(self) -> None:
        """Do for a run that is finished what `start` does for one that goes on; the main process calls this."""
        for gone in self.repaired(self._job.steps):
            self._job.run.event("checkpoint_pruned", gone.step, path=gone.path.name)

    def repaired(self, step: int) -> Iterator[checkpoint.Saved]:
        """Remove what a killed process had still to remove; each checkpoint is given once it is gone."""
        config, folder = self._config, self._job.run.checkpoints
        return repair(folder, config.keep, config.keep_every, spared=self.spared(step))

    # -- when to save, and what to keep -------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return True if the configuration asks for a checkpoint at a step."""
        every = self._config.every
        return bool(every and step % every == 0)

    def spared(self, step: int) -> Set[int]:
        """Steps whose checkpoints stay beside the newest, once that of a step is saved."""
        return frozenset()

    def ask(self) -> None:
        """Have the run save at a step boundary, if something else asks for it. Rank 0 decides for all."""

    def measured(self, step: int, numbers: Mapping[str, Any], *, evaluation: bool = False) -> None:
        """Note what was measured at a step: a line of metrics, or what an evaluation found."""

    # -- elsewhere ----------------------------------------------------------------------------------------------------

    def bring(self, *, after: int = -1, before: int = sys.maxsize) -> Path | None:
        """Fetch the newest whole checkpoint between two steps, exclusive, that lies elsewhere; None without one.

        The main process calls this. It raises a ForgeError if a place can't be read, and `after` is -1.
        """
        return None

    def undo(self) -> None:
        """Finish the roll-back that the run's folder notes: remove what must not be resumed, here and elsewhere."""
        run = self._job.run.dir
        if not self._job.dist.main or (noted := found.noted_roll_back(run)) is None:
            return
        for gone in found.finish_roll_back(run):
            self.tell_pruned(gone)
        if not self.undo_elsewhere(noted.elsewhere):
            found.note_roll_back(run, None)

    def undo_elsewhere(self, step: int) -> bool:
        """Begin to remove the checkpoints of a step and of later ones elsewhere; True if there is such a place."""
        return False

    # -- saving -------------------------------------------------------------------------------------------------------

    def make_way(self, step: int) -> None:
        """Begin to save a step. Raises a ForgeError if an earlier checkpoint could not be written."""
        self._began = time.perf_counter()

    @during("save")
    def save(self, step: int, state: dict[str, Any], *, last: bool) -> None:
        """Save the state of a step; `make_way` came before.

        Args:
            step: the optimizer step it is of.
            state: as `capture` gives it.
            last: whether no step follows: then it is on disk when this returns.

        Raises:
            ForgeError: on every process, if the disk refuses it.
        """
        saved = self.commit(self.stage(step, state), self._job.dist)
        seconds = time.perf_counter() - self._began
        self.tell_saved(saved, seconds, seconds)
        for gone in self.prune(self._job.dist, self.spared(step)):
            self.tell_pruned(gone)

    def stage(self, step: int, state: Mapping[str, Any], copies: Copies | None = None) -> Staged:
        """Decide who writes what of a state, and copy it if training continues meanwhile; see `checkpoint.stage`."""
        run, dist = self._job.run, self._job.dist
        if dist.main:
            remove_remains(run.checkpoints)
        target = run.checkpoints / f"step-{step:08d}"
        staged = stage(target, step, state, dist, copies=copies, before=self._plan, files=self._files)
        self._plan = staged.shards.plan
        return staged

    def commit(self, staged: Staged, by: DistributedContext) -> checkpoint.Saved:
        """Write what was staged, with the files that belong to it."""
        run, names = self._job.run, ("config.toml", "plugins.json", MODEL_FILES)
        beside = [path for name in names if (path := run.dir / name).exists()]
        return commit(staged, by, beside=beside, latest=run.checkpoints / "latest")

    def prune(self, by: DistributedContext, spared: Set[int]) -> Iterator[checkpoint.Saved]:
        """Remove the checkpoints that are not kept beside the newest; each is given once it is gone."""
        config = self._config
        return prune(self._job.run.checkpoints, config.keep, config.keep_every, by, spared=spared)

    def look(self) -> None:
        """Do what there is to do between two steps. Raises a ForgeError if a checkpoint could not be written."""

    def wait(self) -> None:
        """Wait for what is being written; all processes call this. Raises as `look` does."""

    def settle(self) -> None:
        """The run has failed: wait for what is being written. Raises nothing."""

    def close(self) -> None:
        """Let go of what saving needed, once the run is over."""

    # -- telling ------------------------------------------------------------------------------------------------------

    def event_saved(self, saved: checkpoint.Saved, seconds: float, blocked: float) -> None:
        """Record a checkpoint, with the seconds since its save began and those that training waited for it."""
        self._job.run.event(
            "checkpoint_saved", saved.step, path=saved.path.name, bytes=saved.bytes, seconds=seconds, blocked=blocked
        )

    def tell_saved(self, saved: checkpoint.Saved, seconds: float, blocked: float) -> None:
        """Record a checkpoint, and tell the plugins of it."""
        if self._job.dist.main:
            self.event_saved(saved, seconds, blocked)
        self._job.hooks.on_checkpoint(CheckpointEvent("saved", saved.step, saved.path))

    def tell_pruned(self, gone: checkpoint.Saved) -> None:
        """Record that a checkpoint was removed, and tell the plugins of it."""
        if self._job.dist.main:
            self._job.run.event("checkpoint_pruned", gone.step, path=gone.path.name)
        self._job.hooks.on_checkpoint(CheckpointEvent("pruned", gone.step, gone.path))

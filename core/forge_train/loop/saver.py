"""Saving a run's state: at once, or copied at once and written while training continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ..base.errors import describe, during
from ..base.files import remove_remains
from ..checkpoint import checkpoint, found
from ..checkpoint.seal import ALONE
from ..checkpoint.writing import Background, commit, prune, repair, stage
from ..contract.events import CheckpointEvent
from ..contract.protocols import CheckpointCopies, CheckpointPolicy, Copies
from ..mesh.distributed import DistributedContext
from ..plugin import hookspecs
from ..plugin.job import Job
from ..registry.setup import Formats
from ..run.run import MODEL_FILES
from ..store import save_plan

log = logging.getLogger("forge_train")

WORTH_TELLING = 0.1
"""Seconds that a checkpoint has to wait for another one before a warning says so."""


@dataclass(frozen=True)
class _Written:
    """A checkpoint that is whole."""

    saved: checkpoint.Saved
    seconds: float
    """Since its save began."""
    spared: Set[int]
    """Steps that stay beside it and the newest ones."""
    pruned: Sequence[checkpoint.Saved] = ()
    """The older ones that were removed behind training."""


@dataclass(frozen=True)
class _Flight:
    """A checkpoint that is being written."""

    step: int
    blocked: float
    """Seconds that training waited for it."""
    task: Background[_Written]


class Saver:
    """Saves checkpoints, one after the other, and reports them."""

    def __init__(self, job: Job, policy: CheckpointPolicy, elsewhere: Copies, formats: Formats) -> None:
        self._job, self._policy, self._config = job, policy, job.config.checkpoint
        self._stack = ExitStack()
        self.around = hookspecs.around("save", job)
        self._beside = self._stack.enter_context(job.dist.beside()) if self._config.asynchronous else None
        self._copies: save_plan.Copies = {}
        self._plan: Any = None
        self._files = formats(self._config.format)
        self._flight: _Flight | None = None
        self._began = 0.0
        self._spared: Set[int] = frozenset()
        self._elsewhere = elsewhere(job.config, job.run.dir) if job.dist.main else CheckpointCopies()

    def start(self, step: int) -> None:
        """The run begins after a step: what an earlier attempt could not copy elsewhere is tried again."""
        self.undo()
        self._policy.start(self._elsewhere.best() if self._config.folder and step else ())
        for gone in _repaired(self._job, self._policy, step) if self._job.dist.main else ():
            self._tell_gone(gone)
        self._spared = self._policy.spared(step)
        self._elsewhere.send(self._spared)

    def bring(self, before: int) -> None:
        """Have the newest checkpoint of a step before this one in the run's folder; all processes call this."""
        folder = self._job.run.checkpoints
        saved = checkpoint.newest(folder, self._job.dist, before=before)
        self._job.dist.on_main(lambda: self._elsewhere.bring(after=saved.step if saved else -1, before=before))

    def undo(self) -> None:
        """Finish the roll-back that the run's folder notes: remove what must not be resumed, here and elsewhere."""
        run = self._job.run.dir
        if not self._job.dist.main or (noted := found.noted_roll_back(run)) is None:
            return
        for gone in found.finish_roll_back(run):
            self._tell_pruned(gone)
        if not self._elsewhere.undo(noted.elsewhere):
            found.note_roll_back(run, None)

    @during("save")
    def make_way(self, step: int) -> None:
        """Begin to save a step: wait for the checkpoint before.

        Raises:
            ForgeError: on every process, if the disk refused it.
        """
        self._began = time.perf_counter()
        if self._flight is None:
            return
        before = self._flight.step
        self.wait()
        waited = time.perf_counter() - self._began
        if self._job.dist.main and waited >= WORTH_TELLING:
            log.warning(
                "The checkpoint of step %s was still being written when that of step %s was due, which waited %.1f s "
                "for it. Save less often, or to a faster disk.",
                before,
                step,
                waited,
            )

    @during("save")
    def save(self, step: int, state: dict[str, Any], *, last: bool) -> None:
        """Write the state of a step, or copy it and begin to; `make_way` came before.

        Args:
            step: the optimizer step it is of.
            state: as `capture` gives it.
            last: whether no step follows: then it is on disk when this returns.

        Raises:
            ForgeError: on every process, if the disk refuses it.
        """
        job, began = self._job, self._began
        behind = None if last else self._beside
        if job.dist.main:
            remove_remains(job.run.checkpoints)
        staged = stage(
            job.run.checkpoints / f"step-{step:08d}",
            step,
            state | {"best": self._policy.saving(step)},
            job.dist,
            copies=None if behind is None else self._copies,
            before=self._plan,
            files=self._files,
        )
        self._plan = staged.shards.plan
        kept = self._policy.spared(step)
        spared, elsewhere = kept | self._elsewhere.sending, self._elsewhere.everywhere

        def write(by: DistributedContext) -> _Written:
            names = ("config.toml", "plugins.json", MODEL_FILES)
            beside = [path for name in names if (path := job.run.dir / name).exists()]
            saved = commit(staged, by, beside=beside, latest=job.run.checkpoints / "latest")
            return _Written(saved, time.perf_counter() - began, kept)

        if behind is not None:
            task = Background(
                lambda: replace(write(behind), pruned=[*self._remove_old(behind, spared, elsewhere)]), job.dist
            )
            self._flight = _Flight(step, time.perf_counter() - began, task)
            return
        written = write(job.dist)
        self._tell_written(written, written.seconds)
        for gone in self._remove_old(job.dist, spared, elsewhere):
            self._tell_gone(gone)

    @during("save")
    def look(self) -> None:
        """Between two steps: tell of a checkpoint that is whole by now on every process.

        Raises:
            ForgeError: on every process, if the disk refused it.
        """
        if self._flight is not None and self._flight.task.ended():
            self.wait()
        for step in self._elsewhere.look():
            self._policy.removed(step)

    @during("save")
    def wait(self) -> None:
        """Wait for the save in the background, and report it; all processes call this. Raises as `look` does."""
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        with self.around():
            self._tell_written(flight.task.result(), flight.blocked)

    def settle(self) -> None:
        """The run has failed: wait for what is being written, and say what became of it. Raises nothing."""
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        try:
            written = flight.task.result()
            self._spared = written.spared
            if self._job.dist.main:
                log.info("The checkpoint of step %s, which was being written, is whole.", flight.step)
                self._event_saved(written, flight.blocked)
        except Exception as error:
            if self._job.dist.main:
                log.warning("The checkpoint of step %s was not written: %s", flight.step, describe(error))

    def close(self) -> None:
        """Wait for what is being written and copied, and let go of what that needed."""
        self.settle()
        try:
            self._elsewhere.wait()
            if self._job.dist.main and (self._began or self._elsewhere.everywhere):
                self._job.run.check_lock()
                for gone in self._remove_old(ALONE, self._spared, self._elsewhere.everywhere):
                    self._tell_gone(gone)
        except Exception as error:  # the run itself has ended as it did, and its checkpoints are whole
            log.warning("It could not be recorded which checkpoints were copied: %s", describe(error))
        self._stack.close()

    def _remove_old(self, by: DistributedContext, spared: Set[int], elsewhere: Set[int]) -> Iterator[checkpoint.Saved]:
        """Remove the checkpoints that are not kept beside the newest, and those kept in `checkpoint.folder`.

        Args:
            by: who reads and removes.
            spared: steps that stay.
            elsewhere: steps that were copied.
        """
        folder, config = self._job.run.checkpoints, self._config
        yield from prune(folder, config.keep, config.keep_every, by, spared=spared)
        if config.folder and by.main and (newest := next(found.whole(folder, ALONE), None)):
            for saved in found.found(folder):
                if saved.step < newest.step and saved.step in elsewhere:
                    checkpoint.remove(saved)

    # -- telling ------------------------------------------------------------------------------------------------------

    def _tell_written(self, written: _Written, blocked: float) -> None:
        if self._job.dist.main:
            self._event_saved(written, blocked)
        self._job.hooks.on_checkpoint(CheckpointEvent("saved", written.saved.step, written.saved.path))
        self._spared = written.spared
        self._elsewhere.send(self._spared)
        for gone in written.pruned:
            self._tell_gone(gone)

    def _event_saved(self, written: _Written, blocked: float) -> None:
        saved, seconds = written.saved, {"seconds": written.seconds, "blocked": blocked}
        self._job.run.event("checkpoint_saved", saved.step, path=saved.path.name, bytes=saved.bytes, **seconds)

    def _tell_gone(self, gone: checkpoint.Saved) -> None:
        if not self._config.folder:  # where it is kept
            self._tell_pruned(gone)

    def _tell_pruned(self, gone: checkpoint.Saved) -> None:
        self._policy.removed(gone.step)
        if self._job.dist.main:
            self._job.run.event("checkpoint_pruned", gone.step, path=gone.path.name)
        self._job.hooks.on_checkpoint(CheckpointEvent("pruned", gone.step, gone.path))


def repair_finished(job: Job, policy: CheckpointPolicy) -> None:
    """Do for a run that is finished what `Saver.start` does for one that goes on; the main process calls this."""
    policy.start()
    for gone in _repaired(job, policy, job.steps):
        if not job.config.checkpoint.folder:  # where it is kept
            job.run.event("checkpoint_pruned", gone.step, path=gone.path.name)


def _repaired(job: Job, policy: CheckpointPolicy, step: int) -> Iterator[checkpoint.Saved]:
    config = job.config.checkpoint
    return repair(job.run.checkpoints, config.keep, config.keep_every, spared=policy.spared(step))

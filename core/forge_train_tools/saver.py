"""Saving a run's state: at once, or copied at once and written while training continues; with copies elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from forge_train.base.errors import describe, during
from forge_train.checkpoint import checkpoint, found
from forge_train.checkpoint.seal import ALONE
from forge_train.loop import saver
from forge_train.mesh.distributed import DistributedContext
from forge_train.plugin.job import Job
from forge_train.store.save_plan import Copies, MakeFiles
from forge_train_kit.background import Background, beside
from forge_train_kit.full_tensors import files_of
from forge_train_kit.stores.elsewhere import CheckpointCopies, CopiesOf

from .checkpoint_policy import CheckpointPolicy

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


class Saver(saver.Saver):
    """Saves checkpoints, one after the other, and reports them.

    Args:
        job: the run.
        copies: gives its checkpoints elsewhere.
    """

    unknown = ()

    def __init__(self, job: Job, copies: CopiesOf) -> None:
        super().__init__(job)
        self.policy = CheckpointPolicy(job)
        self._copies_of = copies
        self._stack = ExitStack()
        self._beside: DistributedContext | None = None
        self._copies: Copies = {}
        self._flight: _Flight | None = None
        self._spared: Set[int] = frozenset()

    def files(self, form: str) -> MakeFiles | None:
        return files_of(form)

    @cached_property
    def _elsewhere(self) -> CheckpointCopies:
        job = self._job
        return self._copies_of(job.config, job.run.dir) if job.dist.main else CheckpointCopies()

    def open(self) -> None:
        super().open()
        if self._config.asynchronous:
            self._beside = self._stack.enter_context(beside(self._job.dist))
        _ = self._elsewhere  # which may refuse the configuration

    def start(self, step: int) -> None:
        """The run begins after a step: what an earlier attempt could not copy elsewhere is tried again."""
        self.undo()
        self.policy.start(self._elsewhere.best() if self._config.folder and step else ())
        for gone in self.repaired(step) if self._job.dist.main else ():
            self._tell_gone(gone)
        self._spared = self.spared(step)
        self._elsewhere.send(self._spared)

    def finished(self) -> None:
        self.policy.start()
        if not self._config.folder:
            super().finished()
            return
        for _ in self.repaired(self._job.steps):
            pass  # it is kept there

    # -- when to save, and what to keep -------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        return self.policy.due(step) or super().due(step)

    def spared(self, step: int) -> Set[int]:
        return self.policy.spared(step)

    def ask(self) -> None:
        self.policy.ask()

    def measured(self, step: int, numbers: Mapping[str, Any], *, evaluation: bool = False) -> None:
        self.policy.measured(step, numbers, evaluation=evaluation)

    # -- elsewhere ----------------------------------------------------------------------------------------------------

    def bring(self, *, after: int = -1, before: int = sys.maxsize) -> Path | None:
        return self._elsewhere.bring(after=after, before=before)

    def undo_elsewhere(self, step: int) -> bool:
        return self._elsewhere.undo(step)

    # -- saving -------------------------------------------------------------------------------------------------------

    @during("save")
    def make_way(self, step: int) -> None:
        """Begin to save a step: wait for the checkpoint before.

        Raises:
            ForgeError: on every process, if the disk refused it.
        """
        super().make_way(step)
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
        """Write the state of a step, or copy it and begin to."""
        job, began = self._job, self._began
        behind = None if last else self._beside
        described = state | {"best": self.policy.saving(step)}
        staged = self.stage(step, described, copies=None if behind is None else self._copies)
        kept = self.spared(step)
        spared, elsewhere = kept | self._elsewhere.sending, self._elsewhere.everywhere

        def write(by: DistributedContext) -> _Written:
            saved = self.commit(staged, by)
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
            self.policy.removed(step)

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
                self.event_saved(written.saved, written.seconds, flight.blocked)
        except Exception as error:  # the failure that is on its way is the one to raise
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
        yield from self.prune(by, spared)
        folder = self._job.run.checkpoints
        if self._config.folder and by.main and (newest := next(found.whole(folder, ALONE), None)):
            for saved in found.found(folder):
                if saved.step < newest.step and saved.step in elsewhere:
                    checkpoint.remove(saved)

    # -- telling ------------------------------------------------------------------------------------------------------

    def _tell_written(self, written: _Written, blocked: float) -> None:
        self.tell_saved(written.saved, written.seconds, blocked)
        self._spared = written.spared
        self._elsewhere.send(self._spared)
        for gone in written.pruned:
            self._tell_gone(gone)

    def _tell_gone(self, gone: checkpoint.Saved) -> None:
        if not self._config.folder:  # where it is kept
            self.tell_pruned(gone)

    def tell_pruned(self, gone: checkpoint.Saved) -> None:
        self.policy.removed(gone.step)
        super().tell_pruned(gone)

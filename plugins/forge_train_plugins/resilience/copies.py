"""Copies of checkpoints elsewhere."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from forge_train import CheckpointEvent, Plugin, hookimpl
from forge_train_kit.stores.elsewhere import CheckpointCopies

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train.config import Config
    from forge_train_kit.stores.copies import Sent

log = logging.getLogger("forge_train")


class Copies(Plugin):
    """Copies checkpoints to `checkpoint.folder` and `checkpoint.mirror` while training continues, and brings them back.

    Both may be folders or addresses that fsspec knows (`s3://bucket/runs`). A copy is there whole or not at all. What a
    store refuses stays in the run's folder, and is sent with the next checkpoint. A run that continues takes its newest
    checkpoint, wherever it lies.
    """

    api = (1, 0)
    layout = True
    _job: Job | None = None

    @hookimpl
    def checkpoint_copies(self, config: Config, run: Path) -> CheckpointCopies | None:
        section = config.checkpoint
        if not (section.folder or section.mirror):
            return None
        from forge_train_kit.stores.copies import Sender, stores

        keep, every, named = section.keep, section.keep_every, bool(config.run.name)
        return Sender(run / "checkpoints", stores(config, run), keep, every, named=named, tell=self._tell)

    @hookimpl
    def on_start(self, job: Job) -> None:
        self._job = job

    def _tell(self, sent: Sent) -> None:
        """Record a round of copies to a store in the run's events."""
        job = self._job
        assert job is not None  # nothing is copied before the run starts
        for one in sent.copied:
            job.run.event("checkpoint_copied", one.step, path=one.address, seconds=one.seconds, bytes=one.bytes)
        for gone in sent.pruned if sent.keeps else ():
            job.run.event("checkpoint_pruned", gone.step, path=gone.address)
            job.hooks.on_checkpoint(CheckpointEvent("pruned", gone.step, job.run.checkpoints / gone.name))
        if sent.problem:
            log.warning(
                "Checkpoints were not copied: %s. Those that checkpoint.keep selects stay in %s until they are copied: "
                "after the next save, or when the run is continued.",
                sent.problem.rstrip("."),
                job.run.checkpoints,
            )

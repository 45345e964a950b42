"""Copies of checkpoints elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forge_train import CheckpointCopies, Plugin, hookimpl

if TYPE_CHECKING:
    from forge_train.config import Config


class Copies(Plugin):
    """Copies checkpoints to `checkpoint.folder` and `checkpoint.mirror` while training continues, and brings them back.

    Both may be folders or addresses that fsspec knows (`s3://bucket/runs`). A copy is there whole or not at all. What a
    store refuses stays in the run's folder, and is sent with the next checkpoint. A run that continues takes its newest
    checkpoint, wherever it lies.
    """

    api = (1, 0)
    layout = True

    @hookimpl
    def checkpoint_copies(self, config: Config, run: Path) -> CheckpointCopies | None:
        section = config.checkpoint
        if not (section.folder or section.mirror):
            return None
        from forge_train_kit.stores.copies import Sender, stores

        keep, every = section.keep, section.keep_every
        return Sender(run / "checkpoints", stores(config, run), keep, every, named=bool(config.run.name))

"""The hooks of `forge plan` and `forge data show`, and that for checkpoints at other places."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from forge_train.config import Config
from forge_train.contract.batch import Batch
from forge_train.contract.protocols import CheckpointCopies
from forge_train.plugin.job import Job
from forge_train.plugin.specs import hookspec


@hookspec("questions", asked=None)
def example_batch(job: Job) -> Batch | None:
    """A micro-batch of the shape that `build_data` gives for training, without opening the data; `forge plan` asks it
    of the plugin that fills that slot."""


@hookspec("questions", asked=None, observes=True)
def data_stages(job: Job) -> Iterable[tuple[str, str]] | None:
    """Describe what the plugin does with the run's data: a stage and a line of text each; `forge data show` asks.

    Stages are `source`, `decode`, `render`, `tokenise`, `filter`, `map`, `pack`, `order` and `batch`. No training
    follows, and slow work is skipped; missing data is reported in a line too.
    """


@hookspec("questions", asked=None)
def checkpoint_copies(config: Config, run: Path) -> CheckpointCopies | None:
    """Return the copies of a run's checkpoints at other places; None to keep none. `run` is the run's folder."""

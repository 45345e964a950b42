"""The hook of the planner."""

from __future__ import annotations

from forge_train.contract.batch import Batch
from forge_train.plugin.job import Job
from forge_train.plugin.specs import hookspec


@hookspec("questions", asked=None)
def example_batch(job: Job) -> Batch | None:
    """A micro-batch of the shape that `build_data` gives for training, without opening the data; `forge plan` asks it
    of the plugin that fills that slot."""

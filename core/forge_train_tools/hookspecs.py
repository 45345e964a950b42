"""The hooks of `forge plan`, `forge data show` and `forge infer`, and that for checkpoints at other places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from forge_train.config import Config
from forge_train.contract.batch import Batch
from forge_train.contract.protocols import Task
from forge_train.plugin.job import Job
from forge_train.plugin.specs import hookspec
from forge_train_kit.stores.elsewhere import CheckpointCopies


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


@hookspec("questions", asked=None)
def record_outputs(job: Job, task: Task) -> Mapping[str, Callable[..., Mapping[str, Any]]] | None:
    """Name the outputs that `forge infer` can write for a record; by default it writes those of the head's plugin.

    Each is a function of the model's last part, the hidden states that it gave, `[batch, sequence, dim]`, and the
    batch. It returns fields of the result with a value for each row: a tensor `[batch, …]`, or a list. A row is one
    record and padding behind it; `forge_train_tools.inference.outputs.at_last` selects what is at its last token. Under
    context parallelism the tensors are slices of the sequences.
    """

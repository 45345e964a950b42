"""The hooks that the kernel declares; whoever else calls a hook declares it in a module like this one.

A hook is of one kind:

* **slot**: exactly one enabled plugin provides it (some may stay empty);
* **chain**: every plugin is asked for every layer, the default only where all others leave it; at most one answer;
* **phases**: every answer is taken, and ordered by `Phase`;
* **steps**: functions applied one after the other, in order of their phases, then of plugin names;
* **spans**: context managers nested in order of plugin names;
* **event**: everybody is told, in order of plugin names, and returns nothing;
* **questions**: every answer is collected.

What an implementation must return is its spec's annotation: the `Inspection` of a setup holds every value to it.

Adding an argument to a spec is compatible; removing one is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from ..base.errors import Problem
from ..contract.batch import Preparation
from ..contract.events import Metric
from ..contract.protocols import (
    Executor,
    Loader,
    LossScale,
    Schedule,
    Span,
    SpanName,
    Task,
)
from ..contract.transform import Transform
from .specs import hookspec, specs_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..config import Config
    from ..contract.events import CheckpointEvent, Evaluation, Finished, LogRecord, StepResult, Update
    from ..contract.model import Model
    from .job import Job

# -- the model ------------------------------------------------------------------------------------


@hookspec("slot", required=True, asked="composition")
def build_model(job: Job) -> nn.Module:
    """The model; called with the meta device as default, so that nothing is allocated.

    What a model declares about itself is in docs: “How to design a model”.
    """
    raise AssertionError


@hookspec("phases")
def parallelize(job: Job) -> Transform | Iterable[Transform] | None:
    """Changes of the model, each in its phase; None where there is nothing to do at this size."""


# -- the data -------------------------------------------------------------------------------------


@hookspec("slot", required=True, gives="token_rows")
def build_data(job: Job, split: Literal["train", "validation"]) -> Loader:
    """A stateful loader of this rank's micro-batches."""
    raise AssertionError


@hookspec("steps")
def prepare_batch(job: Job) -> Preparation | Iterable[Preparation] | None:
    """Changes of every micro-batch, each in its phase, and looks at a step's; resolved once, at start-up."""


# -- the step -------------------------------------------------------------------------------------


@hookspec(
    "slot",
    required=True,
    checked=True,
    gives="token_labels",
    takes={"head": ("token_logits",), "build_data": ("token_rows",)},
)
def task(job: Job) -> Task:
    """The logic of a step."""
    raise AssertionError


@hookspec("slot", required=True, checked=True)
def executor(model: Model, task: Task, job: Job) -> Executor:
    """Return the executor that runs forward and backward over the step's micro-batches."""
    raise AssertionError


@hookspec("slot", required=True)
def optimizer(model: Model, job: Job) -> torch.optim.Optimizer:
    """The optimizer over `model.named_parameters()`."""
    raise AssertionError


@hookspec("slot", required=True)
def lr_schedule(optimizer: torch.optim.Optimizer, job: Job) -> Schedule:
    """The schedule of learning rates."""
    raise AssertionError


@hookspec("slot", optional=True, checked=True)
def loss_scale(job: Job) -> LossScale:
    """Scaling of the loss, off if no plugin provides it."""
    raise AssertionError


@hookspec("spans")
def around(span: SpanName, job: Job) -> Span | None:
    """A factory of context managers around a span of the run, or None."""


@hookspec("questions", observes=True, used_later=True)
def metrics(model: Model, job: Job) -> Mapping[str, Metric] | None:
    """Numbers that this plugin observes, by name, added up over ranks, logged as `plugin.name`; asked at start-up."""


# -- the run --------------------------------------------------------------------------------------


@hookspec("questions")
def check_config(config: Config) -> Iterable[Problem] | None:
    """Mistakes that only several values together show. Called before anything slow is imported."""


@hookspec("event", observes=True)
def on_start(job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """The run is composed and about to be resumed: the place to look modules up and to make state."""


@hookspec("event")
def on_gradients(update: Update) -> None:
    """After backward and the global norm, before clipping: look, scale, veto."""


@hookspec("event")
def on_step(step: StepResult) -> None:
    """After every optimizer step, skipped ones included."""


@hookspec("event", observes=True)
def on_log(record: LogRecord | Evaluation) -> None:
    """A line of metrics.jsonl was written, or an evaluation on held-out data is done."""


@hookspec("event", observes=True)
def on_checkpoint(event: CheckpointEvent) -> None:
    """A checkpoint is being saved, was saved, loaded or pruned."""


@hookspec("event", observes=True)
def on_end(finished: Finished, job: Job) -> None:
    """The run ended: done, interrupted after a whole checkpoint, diverged or failed.

    After an error, `finished.error` is raised again, or the one that explains it; other ranks may be gone, so make no
    collective then.
    """


SPECS = specs_of(sys.modules[__name__])

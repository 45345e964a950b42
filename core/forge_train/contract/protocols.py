"""Protocols between plugins and core: one typed protocol per slot and chain, one dataclass per event.

Shapes are written `[batch, sequence, …]`. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeAlias, runtime_checkable

from .batch import Batch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .model import Model

Scalar: TypeAlias = "Annotated[Tensor, 'one value']"
"""A 0-dim tensor."""


@runtime_checkable
class Loader(Protocol):
    """`build_data`: a stateful, endless iterator of this rank's micro-batches.

    A rank's n-th micro-batch is number n × `data_ranks` + `data_rank` (both of `job.dist`) of the global stream: ranks
    that share a `data_rank` get the same batch, and any number of data-parallel ranks can resume the stream. Within a
    global batch, a loader may give ranks other sequences than these, and then says which in `sample_ids`. Where that
    would mean that every rank reads everything, a loader may divide its source among the ranks: it then refuses to go
    on with another number of them, and layouts that differ in it can't be compared.

    One whose training data has an end says in an attribute `epoch` how many sequences an epoch has, over all ranks;
    `train.epochs` needs it. Otherwise the length of a run can be given in steps or tokens only.

    One that starts threads or processes ends them in a method `close()`, called when the run ends, however it does.
    """

    def __iter__(self) -> Iterator[Batch]: ...
    def __next__(self) -> Batch: ...
    def state_dict(self) -> dict[str, Any]:
        """JSON only. `sequences`: how many all ranks together have been given; equal on all ranks."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def skip(self, sequences: int) -> None:
        """Move on by that many sequences of the global stream (all ranks together)."""
        ...


@runtime_checkable
class RolloutLoader(Loader, Protocol):
    """A loader whose batches are made with the current model, as reinforcement learning needs; a loader need not."""

    def on_model(self, model: Model) -> None:
        """Called on every rank before the batches of a step, or of an evaluation, are taken.

        The model is in evaluation mode and builds no graph. Every rank has to call it equally often: a forward of a
        sharded model communicates. What was made and not yet used is state; tensors belong in the plugin's own.
        """
        ...


class Task(Protocol):
    """`task`: the logic of a step, for training and for forward-only jobs.

    If each loss belongs to several consecutive rows, such as a pair, the task gives their number in an attribute
    `rows_together`. The conformance suite then does not split them.
    """

    def weight(self, batch: Batch) -> int | float:
        """Return the batch's weight in the mean: its unmasked targets. Called with the batch still on the CPU."""
        ...

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Scalar:
        """Sum of the batch's losses; `hidden` is what the last part gave."""
        ...

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the outputs for a forward-only job, usually the head's."""
        ...


class Executor(Protocol):
    """`executor`: runs forward and backward over the step's micro-batches."""

    def train(self, batches: Sequence[Batch], scale: Tensor | float) -> Scalar:
        """Accumulate gradients of `scale` × the summed losses; gives the unscaled loss sum, a plain tensor.

        Calls `model.on_micro_batch(last, batch=batch)` before each; a pipeline with the part and the direction, too.
        A rank without a loss (a pipeline's earlier stage) gives a 0-dim zero: losses are summed over stages. `batches`
        lie on the job's device.
        """
        ...

    def evaluate(self, batch: Batch) -> Scalar:
        """The batch's loss sum without gradients, a plain tensor; zero on a rank without a loss."""
        ...


class Schedule(Protocol):
    """`lr_schedule`: sets the learning rates; `step()` is called after every optimizer step that was not skipped."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LossScale(Protocol):
    """`loss_scale`: scales the loss so that small gradients survive a narrow dtype."""

    def scale(self) -> Tensor | float:
        """The factor of this step; gradients are divided by it before their norm is taken."""
        ...

    def update(self, skipped: bool) -> None:
        """Called once a step, with whether it was vetoed."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


SpanName = Literal["step", "forward_backward", "optimizer", "evaluate", "save"]
Span = Callable[[], AbstractContextManager[Any]]
"""`around`: makes a context manager for one pass through the span."""

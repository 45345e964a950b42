"""Metrics, and the events that core sends to plugins, one dataclass each. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..base.errors import ForgeError, PluginError, causes
from ..run.records import METRICS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .model import Model


def plain(value: Any) -> int | float:
    """A metric as JSON has it: tensors and numpy's numbers are read."""
    number: int | float = value if isinstance(value, (int, float)) else value.item()
    return number


def _check_metric(key: str, value: Any) -> None:
    """Check that a metric is one number, without waiting for the device."""
    if isinstance(value, (int, float)) or getattr(value, "shape", None) == ():
        return
    shape = getattr(value, "shape", None)
    found = repr(value)[:40] if shape is None else f"shape {list(shape)}"
    raise PluginError(f"the metric {key!r} must be a number or a 0-dim tensor, found {found}.")


def metric_key(plugin: str, name: str) -> str:
    """Key of a plugin's metric: `plugin.name`, or the name alone if it is the plugin's own.

    Raises:
        PluginError: if a plugin is named like one of the run's own metrics, and would replace it.
    """
    if name != plugin:
        return f"{plugin}.{name}"
    if name in METRICS:
        raise PluginError(f"the metric {name!r} is the run's own; give yours another name.")
    return name


@dataclass(slots=True)
class Update:
    """A step's gradients, before clipping (`on_gradients`)."""

    step: int
    loss: Tensor
    """Mean over the unmasked tokens of the global batch; 0-dim, on the device."""
    grad_norm: Tensor
    """Global 2-norm of all gradients; 0-dim, on the device."""
    parameters: Sequence[Tensor]
    vetoed: str = ""
    """Why the step is skipped, if it is."""
    norms: Sequence[tuple[Sequence[int], Tensor]] = ()
    """2-norms of what this rank holds of each gradient, in groups: places among those of `parameters` that have a
    gradient, and a norm for each on the device. Taken before plugins are told."""

    def scale(self, k: Tensor | float) -> None:
        """Multiply every gradient, and the norm, by `k`."""
        from ..mesh.tensors import gradients_of, scale

        scale(gradients_of(self.parameters), k)
        self.grad_norm = self.grad_norm * k

    def veto(self, reason: str) -> None:
        """Skip this step: it counts and moves the data, but neither the weights nor what follows them."""
        self.vetoed = self.vetoed or reason


@dataclass(slots=True)
class StepResult:
    """Result of a step (`on_step`)."""

    step: int
    """From 1."""
    tokens: int
    """Seen so far by all ranks."""
    loss: Tensor
    """Mean over the unmasked tokens of the global batch; 0-dim, on the device."""
    grad_norm: Tensor
    """Global, before clipping; 0-dim, on the device."""
    lr: float
    seconds: float
    """Wall time of the step as the host saw it."""
    skipped: bool
    """True if a plugin vetoed the update."""
    data_range: tuple[int, int]
    """The global sequences this step was trained on: from, up to."""
    metrics: dict[str, Any] = field(default_factory=dict)
    timings: set[str] = field(default_factory=set)
    owner: str = ""
    """The plugin that is being called; set by the hook facade."""

    def add(self, name: str, value: Tensor | float | None, *, timing: bool = False) -> None:
        """Put a metric under the plugin's own name (`ema.distance`; `mfu` for the metric `mfu` of the plugin `mfu`).

        A tensor is read on the host only when the step is logged; None stands for an unknown value. `timing` marks
        values that differ from run to run.
        """
        key = metric_key(self.owner, name)
        if value is not None:
            _check_metric(key, value)
        self.metrics[key] = value
        if timing:
            self.timings.add(key)


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """Event in the life of a checkpoint (`on_checkpoint`)."""

    kind: Literal["saving", "saved", "loaded", "pruned"]
    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One line of metrics.jsonl (`on_log`)."""

    step: int
    steps: int
    """Last step of the run."""
    metrics: Mapping[str, Any]
    """Plain values: `loss`, `grad_norm`, `tokens_per_second`, …; a number may be NaN or infinite."""
    histograms: Mapping[str, Bins] = field(default_factory=dict)
    """Metrics that are histograms; they are not in metrics.jsonl."""


@dataclass(slots=True)
class Evaluation:
    """Results of an evaluation (`on_log`, as soon as it is done)."""

    step: int
    loss: float
    """Mean over the unmasked tokens of the held-out batches, by their weights if they have some."""
    tokens: int
    """Unmasked tokens of the held-out batches."""
    metrics: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Bins] = field(default_factory=dict)
    owner: str = ""

    def add(self, name: str, value: float) -> None:
        """Put a metric under the plugin's own name; it goes into events.jsonl with the evaluation."""
        key = metric_key(self.owner, name)
        _check_metric(key, value)
        self.metrics[key] = plain(value)


Outcome = Literal["done", "interrupted", "diverged", "failed"]


@dataclass(slots=True)
class Finished:
    """End of a run: outcome, last step and exit code (`on_end`)."""

    outcome: Outcome
    step: int
    loss: float | None
    code: int
    run: Path
    reason: str = ""
    generates: bool = False
    """True if the model can continue a sequence: none of its modules looks ahead."""
    closing: list[tuple[str, str]] = field(default_factory=list)
    error: BaseException | None = None
    """The reason why the run failed or diverged (`DivergedError`); None if it is done or interrupted."""
    model: Model | None = None
    """Of a run that failed; None if that was before the model was composed."""
    optimizer: torch.optim.Optimizer | None = None
    log: Path | None = None
    """This rank's log, if there is one, which holds the traceback of a failure."""
    explained: bool = False

    def say(self, title: str, text: str) -> None:
        """Have the command line show a block of text when the run is over (a sample, a summary)."""
        self.closing.append((title, text))

    def explain(self, error: ForgeError) -> None:
        """Have an error shown in place of the one that ended the run. The first explanation stands.

        Raises:
            PluginError: if no error ended the run, or if this is one of the errors that led to its end.
        """
        if self.error is None:
            raise PluginError(f"the run is {self.outcome}; only an error can be explained.")
        if not self.explained:
            if error in causes(self.error):
                raise PluginError("the explanation itself led to the error that ended the run; pass a new error.")
            error.__cause__ = self.error  # which knows the phase and the plugin that it was raised in
            self.error, self.reason, self.code, self.explained = error, str(error), error.code, True


@dataclass(frozen=True, slots=True)
class Bins:
    """A histogram, as trackers draw it."""

    edges: tuple[float, ...]
    """One more than there are bins, ascending."""
    counts: tuple[float, ...]


Value: TypeAlias = "float | Mapping[str, float] | Bins"


class Metric:
    """A number over many batches and all ranks. `forge_train_kit.metrics` has the usual ones.

    Its state is two float64 tensors that its own `update` changes on the device: `sums` are added over ranks, of
    `maxima` the largest is taken (a minimum is the negative of a maximum). Nothing else may be kept, and `update` reads
    no value on the host. A state that was never changed is "nothing observed" and is not logged.

    Args:
        sums: how many numbers are added up; they start at 0.
        maxima: of how many numbers the largest is kept; they start at −∞.
    """

    sums: Tensor
    maxima: Tensor
    timing: bool = False
    """True if it differs from run to run, as timings do."""
    per_rank: bool = False
    """True if each rank observes something of its own, such as its shards of parameters or its memory: states are
    summed over all ranks. Otherwise ranks that see the same data (under tensor parallelism) are counted once."""

    def __init__(self, sums: int = 0, maxima: int = 0) -> None:
        import torch

        self.sums = torch.zeros(sums, dtype=torch.float64)
        self.maxima = torch.full((maxima,), -torch.inf, dtype=torch.float64)

    def value(self, sums: Tensor, maxima: Tensor) -> Value:
        """The result over everything that was observed, from the state of all ranks together, on the CPU.

        Several results are a mapping from names to numbers.
        """
        raise NotImplementedError

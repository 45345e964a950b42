"""The values that plugins exchange with the kit: answers of its hooks, and what it reads from those of the kernel's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge_train.contract.batch import Batch
from forge_train.contract.events import Metric
from forge_train.contract.protocols import Loader, Span

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_train.contract.model import Model

__all__ = ["EvaluatedWeights", "Evaluator", "Extra", "ExtraModel", "InitialWeights"]


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """The answer of `initial_weights`: the model is filled.

    Args:
        missing: weights of the model, of all pipeline stages, that keep their initial values.
        unexpected: stored tensors that were left out.
        source: the path that was read, if not the one in `train.init_from`, such as a run's newest checkpoint.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """An evaluation with data and metrics of its own (`evaluators`).

    Every rank measures its own micro-batches; its metrics are over all of them, and over all ranks.
    """

    name: str
    """Its metrics are `name.metric`."""
    data: Callable[[], Loader]
    """Makes this rank's loader, once; each evaluation starts from the loader's first state."""
    measure: Callable[[nn.Module, Tensor, Batch], None]
    """Updates the metrics with a batch, given the last part and what it gave."""
    metrics: Mapping[str, Metric]
    """Its metrics, by name."""
    batches: int = 0
    """Global batches to take; 0 is `train.evaluate_batches`, and a negative number none, where the loader measures by
    itself (`RolloutLoader`)."""
    due: Callable[[], bool] = lambda: True
    """True if it takes part; asked on each rank before an evaluation of the run, with one answer on all."""


@dataclass(frozen=True)
class EvaluatedWeights:
    """Span `evaluate` of a plugin that evaluates other weights than those trained, and says how to make them from a
    checkpoint: `forge eval`, generation, exports, `train.init_from` and teachers then need neither plugin nor copy."""

    span: Span
    """Puts the weights in, and the trained ones back."""
    terms: Mapping[str, float]
    """Tensors of a checkpoint → their factors in a sum; `{name}` stands for a parameter's name. A parameter for which
    a tensor is missing, such as a frozen one, is evaluated as it is."""

    def __call__(self) -> AbstractContextManager[Any]:
        return self.span()


@dataclass(frozen=True, slots=True)
class ExtraModel:
    """Request from `extra_models` for another model, built by the same plugins and sharded in the same order."""

    name: str
    """Key of `job.models`, and the prefix of its parameters' names."""
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Plugin → values of its section that differ from the run's."""
    weights: str = ""
    """A run or a checkpoint; empty for initial weights."""
    trained: bool = False
    """True if the optimizer updates it and checkpoints store its weights; otherwise it has no gradients."""
    without: tuple[str, ...] = ()
    """Plugins that take no part in it, such as an adapter of the first model."""
    plugins: Mapping[str, Any] = field(default_factory=dict)
    """Name → plugin (`EnabledPlugin`) that takes part in it alone, such as another head's."""
    keys: str = ""
    """The keys that say which model it is, for messages: `distill.weights, distill.teacher`."""

    def __str__(self) -> str:
        return f"the extra model {self.name!r}{self.keys and f' ({self.keys})'}"


@dataclass
class Extra:
    """An extra model, composed."""

    spec: ExtraModel
    model: Model
    path: str = ""
    """The checkpoint that its weights came from."""
    digest: str = ""
    """Of that checkpoint's tensors."""

    def described(self) -> dict[str, Any]:
        """Entry for it in checkpoints, besides the weights of a trained model."""
        return {"path": self.path, "digest": self.digest, "trained": self.spec.trained}

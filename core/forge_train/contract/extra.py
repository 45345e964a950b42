"""Models beside the one that is trained: a teacher, a reference, a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import Model


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

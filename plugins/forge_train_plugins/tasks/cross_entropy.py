"""The loss of language modelling and of classification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from forge_train import Ge, Lt, Plugin, hookimpl, section
from forge_train_kit.losses import LossFunction

if TYPE_CHECKING:
    from forge_train import Job


class CrossEntropy(Plugin):
    """Cross-entropy in fp32 that never holds all logits at once, optionally with z-loss and label smoothing."""

    api = (1, 0)
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "head": ("token_logits", "text_class_logits", "token_class_logits")
    }

    @section
    class Config:
        z_loss: Annotated[float, Ge(0)] = 0.0
        """Weight of the squared log-partition function, which keeps logits from drifting (PaLM uses 1e-4). Not used in
        evaluation."""
        label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
        """Share of the label's probability that is spread over the vocabulary. Not used in evaluation."""
        chunk: Annotated[int, Ge(0)] = 0
        """Tokens whose logits exist at once; 0 chooses by vocabulary and batch."""

    config: Config

    @hookimpl
    def loss(self, job: Job) -> LossFunction:
        from ._cross_entropy import ChunkedCrossEntropy

        return ChunkedCrossEntropy(self.config.z_loss, self.config.chunk, self.config.label_smoothing)

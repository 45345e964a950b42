"""The loss of language modelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from forge_train import Ge, LossFunction, Plugin, hookimpl, section

if TYPE_CHECKING:
    from forge_train import Job


class CrossEntropy(Plugin):
    """Cross-entropy in fp32 that never holds the logits of all tokens at once, with an optional z-loss."""

    api = (1, 0)

    @section
    class Config:
        z_loss: Annotated[float, Ge(0)] = 0.0
        """Weight of the squared log-partition function, which keeps logits from drifting (PaLM uses 1e-4)."""
        chunk: Annotated[int, Ge(0)] = 0
        """Tokens whose logits exist at once; 0 chooses by vocabulary and batch."""

    config: Config

    @hookimpl
    def loss(self, job: Job) -> LossFunction:
        from ._cross_entropy import ChunkedCrossEntropy

        return ChunkedCrossEntropy(self.config.z_loss, self.config.chunk)

"""The dense feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from forge_train import Plugin, hookimpl, section
from forge_train_kit.layers import FeedForward, Layer

if TYPE_CHECKING:
    from forge_train import Job


class SwiGLU(Plugin):
    """Dense feed-forward block, gated by default (Shazeer 2020, arXiv:2002.05202)."""

    api = (1, 0)
    facts = {"plan.per_unit": True}

    @section
    class Config:
        activation: Literal["swiglu", "geglu", "geglu_tanh", "reglu", "gelu", "gelu_tanh", "relu", "relu2"] = "swiglu"
        """The …glu are gated: three projections instead of two. relu2 is the square of relu."""

    config: Config

    @hookimpl
    def feed_forward(self, layer: Layer, job: Job) -> FeedForward:
        from ._swiglu import DenseFeedForward

        return DenseFeedForward(layer, self.config.activation)

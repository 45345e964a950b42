"""Weights by modality, one attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from forge_train import Plugin, Problem, hookimpl, section

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.modalities import Fusion, FusionSpec


class MixtureOfTransformers(Plugin):
    """Weights of its own for each modality, and one attention over the whole sequence (arXiv:2411.04996).

    A mixture of transformers: every layer has norms, attention projections and a feed-forward block for each modality
    beside those of text. Feature vectors stand among the tokens, as with `prefix`, and each position passes through
    the weights of its modality alone, so that a token costs what it costs without modalities.

    The weights of text keep the names that they have in a model of text, and those of a modality are in `others`
    beside them, such as `layers.0.attention.others.image.q.weight`. So a checkpoint of a model of text fills the
    former, with `train.init_from` and `train.init_missing = ["*.others.*", "fusion.*"]`.
    """

    api = (1, 0)

    @section
    class Config:
        shared: tuple[Literal["norms", "attention", "feed_forward"], ...] = ()
        """Parts of each layer whose weights all positions share, such as the norms in CogVLM (arXiv:2311.03079)."""

    config: Config

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        if {*self.config.shared} == {"norms", "attention", "feed_forward"}:
            yield Problem("mot.shared", "leaves modalities no weights of their own; take plugin `prefix` instead.")

    @hookimpl
    def fusion(self, spec: FusionSpec, job: Job) -> Fusion:
        from forge_train_kit.model import InSequence, Kinds

        from ._mot import give_weights

        kinds = Kinds(tuple(spec.encoders), job.step)
        give_weights(spec.blocks, kinds, self.config.shared)
        return InSequence(spec, kinds)

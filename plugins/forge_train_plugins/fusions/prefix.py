"""Items among the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train import Plugin, hookimpl

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.modalities import Fusion, FusionSpec


class Prefix(Plugin):
    """Feature vectors of images and other items stand among the tokens, as in LLaVA (arXiv:2304.08485).

    From there on, all layers treat them like tokens: attention is causal, and stays inside a document. Positions count
    on through the items.
    """

    api = (1, 0)

    @hookimpl
    def fusion(self, spec: FusionSpec, job: Job) -> Fusion:
        from forge_train_kit.model import InSequence

        return InSequence(spec)

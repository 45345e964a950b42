"""Items beside the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from forge_train import ConfigError, Gt, Plugin, PrepareStep, Problem, hookimpl, section
from forge_train_kit.enabled_modalities import enabled_modalities

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train.config import Config as RunConfig
    from forge_train_kit.modalities import Fusion, FusionSpec

EVERY = 4


class CrossAttention(Plugin):
    """Layers between the decoder's in which tokens attend to the items before them, as in Flamingo (arXiv:2204.14198).

    Each has attention and a feed-forward block, both behind a gate, in the form of Llama 3.2 Vision. The gates start
    closed, so the model starts as that of text alone. An item takes one position of the sequence: its placeholder. A
    token without an item at or before it in its document passes unchanged.
    """

    api = (1, 0)
    gives = {"fusion": "token"}

    @section
    class Config:
        every: Annotated[int, Gt(0)] = EVERY
        """One such layer stands before each so many-th layer of the decoder: before 3, 7, 11, …, counted from 0."""
        layers: tuple[int, ...] = ()
        """Layers of the decoder before which one stands, instead of `every`."""
        attend: Literal["all", "last", "run"] = "all"
        """Items that a token attends to: all at or before it in its document; the last one of each modality, as in
        Flamingo; or the last ones whose placeholders follow each other (run), as in Llama 3.2 Vision."""
        gate: float = 0.0
        """Value at which gates start; they multiply by its tanh."""

    config: Config

    @hookimpl
    def fusion(self, spec: FusionSpec, job: Job) -> Fusion:
        from ._cross_attention.fusion import Between

        config = self.config
        at = config.layers or tuple(range(config.every - 1, spec.layers, config.every))
        if not at:
            raise ConfigError(
                f"cross_attention.every = {config.every}: the model has {spec.layers} layers, so that no layer would "
                "see an item; choose a smaller number."
            )
        if beyond := [one for one in at if not 0 <= one < spec.layers]:
            raise ConfigError(
                f"cross_attention.layers: the model has layers 0 to {spec.layers - 1}, found {beyond[0]}."
            )
        return Between(spec, sorted(set(at)), attend=config.attend, gate=config.gate, parts=job.dist.layout.pp > 1)

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareStep:
        from ._cross_attention.ranges import with_ranges

        names, attend = tuple(enabled_modalities(job)), self.config.attend
        return PrepareStep(lambda batches: [with_ranges(batch, names, attend) for batch in batches])

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if self.config.layers and self.config.every != EVERY:
            yield Problem("cross_attention.every", "has no effect beside cross_attention.layers; set one of them.")

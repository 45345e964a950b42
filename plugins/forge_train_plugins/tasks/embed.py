"""Embeddings of texts: pooled hidden states, learned from pairs that belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_train import ConfigError, Ge, Gt, Plugin, Preparation, Task, hookimpl, section
from forge_train_kit.heads import Head, HeadSpec

if TYPE_CHECKING:
    from forge_train import Job, Metric, Model


class Embed(Plugin):
    """Text embeddings by contrastive learning: an anchor should be nearer to its own positive than to others.

    The loss is InfoNCE (arXiv:1807.03748, eq. 4) of cosine similarities, averaged over pairs. The negatives are the
    positives of other pairs, gathered over all data-parallel ranks. `embed.recall_at_1` is the share of
    anchors whose positive is the nearest, and `embed.mrr` is the mean of 1 / rank. An export is the model without a
    head (`…Model` of transformers); pool and normalise its hidden states yourself.
    """

    api = (1, 0)
    facts = {"plan.per_unit": True}
    gives: ClassVar[Mapping[str, str]] = {"head": "embeddings", "task": "embeddings"}
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {"head": ("embeddings",), "build_data": ("pairs",)}

    @section
    class Config:
        pooling: Literal["mean", "last", "cls"] = "mean"
        """The vector of a text: the mean over its tokens, its last token, or its first one."""
        temperature: Annotated[float, Gt(0)] = 0.05
        """Similarities are divided by this temperature."""
        group: Annotated[int, Ge(0)] = 0
        """Number of neighbouring pairs in the global batch that are each other's negatives; 0 means the whole global
        batch, which must then be one micro-batch of each rank."""

    config: Config
    _observed: Mapping[str, Metric] | None = None

    @hookimpl
    def head(self, spec: HeadSpec, job: Job) -> Head:
        from ._embed import NoHead

        return NoHead()

    @hookimpl
    def prepare_batch(self) -> Preparation:
        from forge_train_kit.model import prepare_pooling

        return prepare_pooling(self.config.pooling)

    @hookimpl
    def task(self, job: Job) -> Task:
        from ._embed import Contrastive

        train, group = job.config.train, self.config.group
        together = train.micro_batch * job.dist.data_ranks // 2
        if not group and job.dist.layout.micro_batches(train.global_batch, train.micro_batch) > 1:
            raise ConfigError(
                f"embed.group: the global batch of {train.global_batch // 2} pairs is computed in groups of {together} "
                f"pairs, so other pairs can't be negatives; set embed.group to {together} or a divisor of it, or "
                "train.micro_batch to the rank's share."
            )
        if group and together % group:
            raise ConfigError(
                f"embed.group: {group} does not divide the {together} pairs that are computed together "
                f"(train.micro_batch × data-parallel ranks / 2)."
            )
        return Contrastive(job, self.config.temperature, group or together, lambda: self._observed)

    @hookimpl
    def record_outputs(self, task: Task) -> Mapping[str, Callable[..., Mapping[str, Any]]]:
        return {"embedding": lambda *of: {"embedding": task.outputs(*of)}}

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        from forge_train_kit.metrics import Mean

        self._observed = {"recall_at_1": Mean(), "mrr": Mean()}
        return self._observed

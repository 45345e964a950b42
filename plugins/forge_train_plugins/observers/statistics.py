"""Norms, activations and attention logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from forge_train import CheckpointEvent, Job, Metric, Model, Plugin, Problem, StepResult, Update, hookimpl, section
from forge_train.contract.protocols import Span, SpanName

if TYPE_CHECKING:
    from forge_train.config import Config as RunConfig

    from ._statistics import Observer


class Statistics(Plugin):
    """Logs 2-norms of parameters, gradients and updates by group, and on request statistics of activations and logits.

    Everything is of the logged steps alone, exact on any topology. Gradients are taken before clipping, parameters
    after the update. For `updates`, a logged step keeps a copy of the parameters while the optimizer works.

    An activation is the output of a module, or the first of several: `rms`, the largest magnitude (`max`) and the share
    of `zeros`, over all micro-batches. An attention logit is what the softmax is given, before a soft cap, of the keys
    that a query sees; of each module with a kernel, the largest magnitude is logged. It costs about a forward of
    attention.

    Under `compile`, units whose modules are watched are compiled once more for logged steps, in several graphs. Under
    sequence parallelism the tokens that fill up a sequence count as activations.
    """

    api = (1, 0)
    layout = True

    @section
    class Config:
        norms: tuple[Literal["parameters", "gradients", "updates"], ...] = ("parameters", "gradients", "updates")
        """Norms of what."""
        groups: tuple[str, ...] = ()
        """Patterns of parameters, each a group; without any, each kind of module is one (`layers.attention`)."""
        activations: tuple[str, ...] = ()
        """Patterns of modules whose outputs are observed, together for each kind (`layers.*.attention`)."""
        layers: bool = False
        """Separate modules of a kind by layer (`layers.0.attention`)."""
        attention_logits: bool = False
        """Log the largest attention logit of each layer."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._observer: Observer | None = None

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        own = self.config
        if config.values().get("compile.fullgraph") and (own.activations or own.attention_logits):
            yield Problem("compile.fullgraph", "can't hold where statistics observes activations or attention logits.")
        if not (own.norms or own.activations or own.attention_logits):
            yield Problem("statistics.norms", "is empty, and nothing else is observed; leave the plugin out instead.")
        if own.attention_logits and config.parallel.cp > 1:
            yield Problem(
                "statistics.attention_logits",
                f"looks at whole sequences, and with parallel.cp = {config.parallel.cp} a rank has slices of them.",
            )
        if own.groups and not own.norms:
            yield Problem("statistics.groups", "has no effect where statistics.norms is empty.")

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        from ._statistics import Observer

        self._observer = Observer(self.config, model, job)
        return self._observer.metrics

    @hookimpl
    def on_start(self, model: Model) -> None:
        if self._observer:
            self._observer.attach(model)

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        if span not in ("forward_backward", "optimizer"):
            return None
        return lambda: self._observer.around(span) if self._observer else nullcontext()

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if self._observer and event.kind == "loaded":
            self._observer.step = event.step

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        if self._observer:
            self._observer.gradients()

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if self._observer:
            self._observer.end(step.step)

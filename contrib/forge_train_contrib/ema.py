"""An average of the weights, as an outside author would write it: this file is all there is to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import Gt, Lt, Model, Plugin, Span, SpanName, StepResult, hookimpl, section
from forge_train_kit.contract import EvaluatedWeights

if TYPE_CHECKING:
    from torch import Tensor


class EMA(Plugin):
    """Exponential moving average of the weights, used for evaluation (Polyak and Juditsky 1992)."""

    api = (1, 0)

    @section
    class Config:
        decay: Annotated[float, Gt(0), Lt(1)] = 0.999
        """Share of the average that a step keeps; less in the first steps, which forget what was before them."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._weights: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._steps = 0

    @hookimpl
    def on_start(self, model: Model) -> None:
        self._weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        self._average = {name: weight.clone() for name, weight in self._weights.items()}

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if step.skipped:
            return
        # 0 at the first step: the weights may have been loaded after on_start, and those of chance should not count.
        decay = min(self.config.decay, self._steps / (self._steps + 9))
        for name, average in self._average.items():
            average.lerp_(self._weights[name], 1 - decay)
        self._steps += 1

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        if span != "evaluate":
            return None
        return EvaluatedWeights(self._averaged, {"plugins.ema.average.{name}": 1.0})

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Exchange weights and average, one after the other, so that no third copy of all of them is needed."""
        if self._steps:
            for name, average in self._average.items():
                kept = average.clone()
                average.copy_(self._weights[name])
                self._weights[name].copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """The average by parameter name, and the steps it is over."""
        return {"average": dict(self._average), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        for name, average in state["average"].items():
            self._average[name].copy_(average)

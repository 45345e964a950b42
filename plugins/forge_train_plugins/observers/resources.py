"""Time and memory of a step, by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_train import Job, Metric, Plugin, StepResult, hookimpl
from forge_train.contract.protocols import Span, SpanName

if TYPE_CHECKING:
    from ._resources import Clock


class Resources(Plugin):
    """Logs the seconds of a step by part, and memory, with the rank that has the most of each.

    Parts of a step: `data` (until the forward pass begins, with the wait for other ranks' data), `forward_backward`,
    `optimizer`, and `other` (clipping, plugins). `save` and `evaluate` are of whole saves and evaluations. Times are
    those of the host: on a CUDA device, a part lasts as long as it takes to queue its kernels, and
    `step_device_seconds`, `forward_backward_device_seconds` and `optimizer_device_seconds` say how long the device
    takes for them, by events in its stream. Nothing waits for the device between logged steps. Memory is the peak of
    the process (`host_gib`), and on a CUDA device its allocator's: `allocated_gib`, `reserved_gib`, `peak_gib` and
    `retries`.

    On several ranks, each is a `mean`, a `max`, and the `rank` of the largest.
    """

    api = (1, 0)
    layout = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._clock: Clock | None = None

    @hookimpl
    def metrics(self, job: Job) -> Mapping[str, Metric]:
        from ._resources import Clock

        self._clock = Clock(job)
        return self._clock.metrics

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        return lambda: self._clock.span(span) if self._clock else _nothing()

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if self._clock:
            self._clock.step(step.step)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()

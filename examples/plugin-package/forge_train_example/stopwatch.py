"""Spans: the hook `around`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from forge_train import Plugin, Span, SpanName, StepResult, hookimpl


class Stopwatch(Plugin):
    """Logs the seconds that the parts of a step took, as the host sees them."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._seconds: dict[str, float] = {}

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        return partial(self._timed, span) if span in ("forward_backward", "optimizer") else None

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        for span, seconds in self._seconds.items():
            step.add(span, seconds, timing=True)
        self._seconds.clear()

    @contextmanager
    def _timed(self, span: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[span] = time.perf_counter() - began

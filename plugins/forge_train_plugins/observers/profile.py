"""A profile of some steps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import Gt, Job, Model, Plugin, Volatile, hookimpl, section
from forge_train.contract.protocols import Span, SpanName

if TYPE_CHECKING:
    from ._profile import Window


class Profile(Plugin):
    """Profiles some steps with torch.profiler: a trace of each rank, and a table, in the run's `artifacts/profile/`.

    `trace-rank-0.json.gz` opens in Perfetto or chrome://tracing; the spans of the step are marked in it, and with NVTX
    on a CUDA device. `rank-0.txt` has the operations that took longest; `forge runs report` shows it. The profiled
    steps are slower, the others are not.
    """

    api = (1, 0)
    layout = True

    @section
    class Config:
        start: Annotated[int, Gt(0), Volatile()] = 10
        """The first profiled step, counted from the start or the resume of the run."""
        steps: Annotated[int, Gt(0), Volatile()] = 3
        """How many."""
        rows: Annotated[int, Gt(0), Volatile()] = 25
        """Operations in the table."""
        shapes: Annotated[bool, Volatile()] = False
        """Whether the trace has the shapes of operands."""
        memory: Annotated[bool, Volatile()] = False
        """Whether it has allocations, and the table their sizes."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._window: Window | None = None

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        from ._profile import Window

        self._window = Window(job, self.config)

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        return lambda: self._window.span(span) if self._window else nullcontext()

    @hookimpl
    def on_finish(self, finished: Any) -> None:
        if self._window:
            self._window.check()

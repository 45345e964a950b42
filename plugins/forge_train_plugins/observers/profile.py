"""A profile of some steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import Finished, Ge, Gt, Job, Model, Plugin, Problem, Volatile, hookimpl, section
from forge_train.contract.protocols import Span, SpanName

if TYPE_CHECKING:
    from ._profile.window import Window


class Profile(Plugin):
    """Profiles some steps with torch.profiler: a trace of each rank, and a table, in the run's `artifacts/profile/`.

    `trace-rank-0.json.gz` opens in Perfetto or chrome://tracing; the spans of the step are marked in it. `rank-0.txt`
    says how much of a step is computing, communication, and communication while nothing computes, and has the
    operations that took longest; `forge runs report` shows it. The profiled steps are slower, the others are not.
    """

    api = (1, 0)
    layout = True

    @section
    class Config:
        start: Annotated[int, Gt(0), Volatile()] = 10
        """The first profiled step, counted from the start or the resume of the run."""
        steps: Annotated[int, Ge(0), Volatile()] = 3
        """Number of profiled steps; 0 for none, as under Nsight Systems."""
        rows: Annotated[int, Gt(0), Volatile()] = 25
        """Operations in the table."""
        shapes: Annotated[bool, Volatile()] = False
        """Record operand shapes in the trace."""
        memory: Annotated[bool, Volatile()] = False
        """Record allocations in the trace, and their sizes in the table."""
        snapshot: Annotated[bool, Volatile()] = False
        """Also write `memory-rank-0.pickle`: every allocation of the profiled steps with its stack, for
        pytorch.org/memory_viz. On CUDA only."""
        nvtx: Annotated[bool, Volatile()] = False
        """Mark the spans of all steps as NVTX ranges, for Nsight Systems. On CUDA only."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._window: Window | None = None

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        if not self.config.steps and not self.config.nvtx:
            yield Problem("profile.steps", "is 0, and profile.nvtx is off; leave the plugin out instead.")
        if not self.config.steps and self.config.snapshot:
            yield Problem("profile.snapshot", "has no effect where profile.steps = 0.")

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        from ._profile.window import Window

        self._window = Window(job, self.config)

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        return lambda: self._window.span(span) if self._window else nullcontext()

    @hookimpl
    def on_end(self, finished: Finished) -> None:
        if self._window and finished.error is None:
            self._window.check()

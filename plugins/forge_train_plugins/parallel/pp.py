"""Pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from forge_train import Executor, FilePath, Ge, Phase, Plugin, Problem, Task, Transform, hookimpl, section

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_train import Applied, Job, Model
    from forge_train.config import Config as RunConfig

    from ._pp.cutting import Cut


class PipelineParallel(Plugin):
    """Each rank holds some of the layers, and micro-batches pass through the ranks (arXiv:1811.06965).

    The model is cut between its `stages` into parts of equal FLOPs. The micro-batches of a step are those of gradient
    accumulation: `train.global_batch` / (`train.micro_batch` × data-parallel ranks). A schedule sets the order in which
    each rank runs its forward and backward passes. `forge plan` draws the schedule, and a run saves the drawing as
    `artifacts/pipeline.svg`. The schedules are torch's, and those that distributions register under the entry point
    `forge_train.pipeline_schedules`.
    """

    api = (1, 0)
    layout = True
    provides = ("pp",)
    facts = {
        "plan.per_unit": True,
        "plan.search": (
            "pp.schedule=1f1b",
            "pp.schedule=interleaved_1f1b;pp.parts=2",
            "pp.schedule=interleaved_1f1b;pp.parts=4",
            "pp.schedule=interleaved_zero_bubble;pp.parts=2",
            "pp.schedule=zbv",
        ),
    }

    @section
    class Config:
        schedule: str = "1f1b"
        """`gpipe`, `1f1b`, `looped_bfs`, `interleaved_1f1b`, `interleaved_zero_bubble`, `zbv` or `dualpipe_v`; the name
        of a schedule that a distribution registers; a function as `module:name`, called with the numbers of ranks, of
        parts on each rank and of micro-batches, which returns a `Timetable`; or `csv`, which reads `table`."""
        parts: Annotated[int, Ge(0)] = 0
        """Parts of the model on each rank; 0 for the number that the schedule needs. A table, or what a function
        returns, is refused if it has another number."""
        cuts: tuple[str, ...] = ()
        """The first module of each part after the first, such as `layers.4`; if empty, the model is cut into parts of
        equal FLOPs."""
        table: Annotated[str, FilePath()] = ""
        """For schedule = "csv": a CSV file of actions, with one line for each rank, such as `0F0,0F1,0B0,0B1`."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.cut: Cut | None = None
        """This rank's parts, once the model is cut."""

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        if job.dist.layout.pp == 1:
            return None

        def apply(model: nn.Module) -> Applied:
            from ._pp.cutting import cut

            self.cut = cut(model, self.config, job)
            return self.cut.applied

        return Transform(Phase.PIPELINE, "pipeline", apply, covers=("pp",))

    @hookimpl
    def executor(self, model: Model, task: Task, job: Job) -> Executor:
        from ._pp.executor import Pipeline

        return Pipeline(model, task, job, self.config, self.cut)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        if self.cut is None or not job.dist.main:
            return
        from ._pp.picture import picture
        from ._pp.schedules import timetable

        layout, train = job.dist.layout, job.config.train
        count = layout.micro_batches(train.global_batch, train.micro_batch)
        table = timetable(self.config, layout.pp, count)
        file = job.run.artifact("pipeline.svg")
        title = f"{self.config.schedule} on {layout.pp} ranks, {count} micro-batches"
        file.write_text(picture(table, self.cut.costs, title), encoding="utf-8")
        job.record(file, self)

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        from ._pp.rules import check

        yield from check(self.config, config)

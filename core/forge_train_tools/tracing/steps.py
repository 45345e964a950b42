"""The steps of a traced run, on one rank."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from forge_train.base.files import write_json
from forge_train.contract.batch import MicroBatch
from forge_train.contract.events import StepResult, Update
from forge_train.loop.assembly import assemble
from forge_train.mesh.world import World
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train.run.run import Run
from forge_train.step.step import Progress, Watcher
from forge_train_kit.ranks import coordinates, in_words
from forge_train_kit.starting import Weights

from ..configuration.request import Request
from ..configuration.setup import resolve
from ..process import prepared
from ..verification.watched import begin
from .callers import owners
from .clocks import offset_to_first
from .modules import Modules
from .record import RankTrace, shift
from .watch import Calls


def worker(request: dict[str, Any], step: int, folder: str) -> dict[str, Any]:
    """Run one process of a traced run, and leave the trace of its step."""
    setup = resolve(Request.loaded(request), world=World.here().size)
    with prepared(setup, Run(Path(folder) / "run")) as job:
        steps = Steps(job)
        for _ in range(step - 1):
            steps.take()
        found = steps.traced()
        write_json(Path(folder) / f"rank-{job.dist.rank}.json", found.plain())
        job.dist.barrier()
        return {"code": 0, "device": job.device.type}


class Steps(Watcher):
    """A run's first steps, as training takes them."""

    def __init__(self, job: Job) -> None:
        self.job, self.progress, self.modules = job, Progress(), Modules()
        self.stepper = assemble(job, self)
        self.model, self.optimizer = self.stepper.model, self.stepper.optimizer
        begin(job.hooks, self.stepper)
        weights = Weights(job, whole=True)
        weights.start_extra(None)
        weights.start(self.model)
        self.before: list[float] = []
        self._around_step = hookspecs.around("step", job)

    def take(self) -> StepResult:
        """Take a step."""
        self.model.train()
        began = time.perf_counter()
        with self._around_step():
            result = self.stepper.run(self.progress)
        self.before.append(time.perf_counter() - began)
        self.stepper.tell(result)
        self.job.control.take()
        return result

    def traced(self) -> RankTrace:
        """Take a step, and record it; every rank calls this."""
        dist, modules = self.job.dist, self.modules
        calls = Calls(self.job, modules, owners(hookspecs.parallelize(self.job)))
        offset, error = offset_to_first() if dist.world > 1 else (0.0, 0.0)
        before = list(self.before)
        with ExitStack() as stack:
            stack.enter_context(modules.followed(self.model.parts))
            stack.callback(self._told_of_gradients())
            if dist.world > 1:
                stack.enter_context(calls)
            dist.barrier()
            start = time.perf_counter()
            modules.begin("data")
            result = self.take()
            modules.begin("")
            end = time.perf_counter()
        notes = [f"Module {name} is compiled, and is not looked into" for name in modules.uncut]
        found = RankTrace(
            rank=dist.rank,
            name=f"rank {dist.rank}{in_words(coordinates(dist.layout, dist.rank))}",
            start=start,
            end=end,
            loss=float(result.loss),
            error=error,
            before=before,
            segments=modules.segments,
            calls=calls.found,
            notes=notes,
        )
        shift(found, -offset)
        return found

    def on_micro_batch(self, micro: MicroBatch) -> None:
        self.modules.begin("forward" if micro.direction in ("both", "forward") else "backward")

    def on_backward(self, update: Update) -> Update:
        self.modules.begin("update")
        return update

    def _told_of_gradients(self) -> Any:
        """Have the model say when all passes have ended; returns what undoes that."""
        model: Any = self.model
        after = model.after_backward

        def ended() -> None:
            self.modules.begin("gradients")
            after()

        model.after_backward = ended
        return lambda: delattr(model, "after_backward")

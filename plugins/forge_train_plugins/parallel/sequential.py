"""Forward and backward, one micro-batch after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train import Executor, Plugin, Task, hookimpl

if TYPE_CHECKING:
    from forge_train import Job, Model


class Sequential(Plugin):
    """Runs forward and backward over the micro-batches of a step, one after the other."""

    api = (1, 0)
    layout = True
    facts = {"plan.per_unit": True}

    @hookimpl
    def executor(self, model: Model, task: Task, job: Job) -> Executor:
        from ._sequential import SequentialExecutor

        return SequentialExecutor(model, task, job)

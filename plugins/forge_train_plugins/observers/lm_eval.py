"""Tasks that a run's evaluations ask the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import Ge, Plugin, Problem, Volatile, hookimpl, section

if TYPE_CHECKING:
    from forge_train import Config as RunConfig
    from forge_train import Job, Model, StepResult
    from forge_train_kit.contract import Evaluator
    from forge_train_tools.evaluation.during import TasksOfRun


class LMEval(Plugin):
    """Asks the questions of tasks, those of lm-evaluation-harness among them, when the run evaluates.

    The numbers are those of `forge eval --task` on a checkpoint of that step, on every layout. The run itself stays bit
    for bit the same.
    """

    api = (1, 0)
    requires = ("tokenizer",)

    @section
    class Config:
        tasks: Annotated[tuple[str, ...], Volatile()] = ()
        """As for `forge eval --task`: files of tasks or of records, names of tasks of lm-eval, or YAML files for it."""
        every: Annotated[int, Ge(0), Volatile()] = 0
        """Steps between them, a multiple of `train.evaluate_every`, with one more at the end; 0 asks whenever the run
        evaluates."""
        limit: Annotated[int, Ge(0), Volatile()] = 0
        """Records of each task, from the beginning; 0 takes all."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._job: Job | None = None
        self._tasks: TasksOfRun | None = None
        self._due = True

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        every, evaluates, best = self.config.every, config.train.evaluate_every, config.checkpoint.best
        if not self.config.tasks:
            yield Problem("lm_eval.tasks", "name at least one task, or leave the plugin out.")
        if not evaluates:
            yield Problem(
                "train.evaluate_every", "is 0, so no task of lm_eval is ever asked; set it to a number of steps."
            )
        elif every % evaluates:
            yield Problem(
                "lm_eval.every",
                f"{every} is no multiple of train.evaluate_every = {evaluates}, and tasks are asked only when the run "
                "evaluates; change one of the two.",
            )
        elif every > evaluates and best.startswith("evaluation.lm_eval."):
            yield Problem(
                "checkpoint.best",
                f"{best!r} is needed at each evaluation, and lm_eval.every = {every} leaves some out; set that to 0.",
            )

    @hookimpl
    def evaluators(self, job: Job) -> Evaluator:
        from forge_train_tools.evaluation.during import TasksOfRun

        self._job, self._tasks = job, TasksOfRun(job, "lm_eval", self.config.tasks, self.config.limit)
        return self._tasks.evaluator(lambda: self._due)

    @hookimpl
    def on_start(self, model: Model) -> None:
        if self._tasks is not None:
            self._tasks.check(model)

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if self.config.every and self._job is not None:
            self._due = not step.step % self.config.every or step.step == self._job.steps

"""Tasks that a run's evaluations ask the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from forge_train import Ge, Plugin, Problem, hookimpl, section

if TYPE_CHECKING:
    from forge_train import Config as RunConfig
    from forge_train import Evaluator, Job


class LMEval(Plugin):
    """Asks the questions of tasks, those of lm-evaluation-harness among them, whenever the run evaluates."""

    api = (1, 0)
    requires = ("tokenizer",)

    @section
    class Config:
        tasks: tuple[str, ...] = ()
        """As for `forge eval --task`: files of tasks or of records, names of tasks of lm-eval, or YAML files for it.
        The model must not have to write."""
        limit: Annotated[int, Ge(0)] = 0
        """Records of each task, from the beginning; 0 takes all."""

    config: Config

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if not self.config.tasks:
            yield Problem("lm_eval.tasks", "name at least one task, or leave the plugin out.")
        if not config.train.evaluate_every:
            yield Problem(
                "train.evaluate_every", "is 0, so no task of lm_eval is ever asked; set it to a number of steps."
            )

    @hookimpl
    def evaluators(self, job: Job) -> Evaluator:
        from forge_train_tools.evaluation.during import evaluator

        return evaluator(job, "lm_eval", self.config.tasks, self.config.limit)

"""Learning from another model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import ExtraModel, Ge, Gt, Le, Plugin, Problem, Task, hookimpl, section
from forge_train.config.schema import FilePath
from forge_train_kit.hookspecs import loss

if TYPE_CHECKING:
    from forge_train import Job, Metric, Model


class Distill(Plugin):
    """Next-token prediction from a teacher's soft targets and the labels (Hinton et al. 2015, arXiv:1503.02531).

    The teacher is frozen. It is built by the run's plugins, with the sections that differ from the student's, and
    sharded like the student. `distill.divergence` in the metrics is the mean divergence per token. Evaluation uses the
    loss on labels alone. If the teacher has moved, resume the run with its new path in `distill.weights` and
    `checkpoint.allow_changes = ["distill.weights"]`; its weights must be identical.
    """

    api = (1, 0)
    requires = ("loss",)

    @section
    class Config:
        weights: Annotated[str, FilePath()] = ""
        """The teacher: a run, or a checkpoint."""
        teacher: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
        """Sections of the teacher that differ from the student's, as in `[distill.teacher.decoder]`."""
        share: Annotated[float, Gt(0), Le(1)] = 0.5
        """Weight of the divergence from the teacher in the loss; the rest is the loss on labels."""
        divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
        """forward is KL(teacher ‖ student): the student covers all that the teacher says. reverse is KL(student ‖
        teacher): it keeps to what the teacher finds likely (arXiv:2306.08543). jensen_shannon is the mean of both
        models' divergences from their mean (arXiv:2306.13649, eq. 1, with β = ½)."""
        temperature: Annotated[float, Gt(0)] = 1.0
        """Divides both models' logits in the divergence, which is multiplied by its square."""
        chunk: Annotated[int, Ge(0)] = 0
        """Tokens whose logits exist at once; 0 chooses by vocabulary and batch."""

    config: Config
    _observed: Any = None

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        if not self.config.weights:
            yield Problem("distill.weights", "is required: the teacher's run or its checkpoint.")

    @hookimpl
    def extra_models(self, job: Job) -> Iterable[ExtraModel]:
        from forge_train_kit.facts import tuners

        mine, keys = self.config, "distill.weights, distill.teacher"
        yield ExtraModel("teacher", mine.teacher, mine.weights, without=tuners(job), keys=keys)

    @hookimpl
    def on_start(self, job: Job) -> None:
        """Compare the tokenizers.

        Raises:
            ConfigError: the teacher has another one.
        """
        from forge_train_kit.model_files import expect_same_words

        expect_same_words(job, self.config.weights, "distill.weights")

    @hookimpl
    def task(self, job: Job) -> Task:
        from ._distill import Distillation

        mine = self.config
        return Distillation(
            loss(job), job.models, mine.share, mine.temperature, mine.chunk, mine.divergence, lambda: self._observed
        )

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        from forge_train_kit.metrics import Ratio

        self._observed = Ratio()
        return {"divergence": self._observed}

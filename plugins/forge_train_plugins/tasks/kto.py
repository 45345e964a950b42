"""Kahneman-Tversky optimisation: a language model learns from answers that were judged one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from forge_train import Batch, Ge, Gt, Lt, Preparation, PrepareStep, Problem, Task, hookimpl, section
from forge_train_kit.reference.plugin import ReferencePlugin, ReferenceSection

if TYPE_CHECKING:
    from forge_train import Job, Metric, Model
    from forge_train.config import Config as RunConfig

    from ._kto import JudgedAnswers, ReferencePoint


class KTO(ReferencePlugin):
    """Unpaired preferences: desirable answers are to become more likely, and undesirable ones less (arXiv:2402.01306).

    The loss is eq. 8: with r the log-probability of an answer less the reference's, it is λ_D · (1 − σ(β (r − z0))) for
    a desirable answer and λ_U · (1 − σ(β (z0 − r))) for an undesirable one, and the mean over the answers of the global
    batch. The reference point z0 estimates how far the model is from its reference: it is the mean of r over the
    prompts of the global batch, each with the answer of another prompt, and at least 0. It has no gradient, and is
    computed without dropout, before the first micro-batch of a step. Only the tokens of the answers count, including
    the one that ends the turn.

    The reference is by default the weights that the run starts from: with `lora`, the run's own model while its updates
    are switched off, and otherwise a second model.

    An answer's reward is β r. `kto.chosen_reward` is its mean over desirable answers, `kto.rejected_reward` that over
    undesirable ones, `kto.margin` the difference of the two, and `kto.kl` is z0. Other plugins see the batches of
    mismatched answers too, which have the target `mismatched`.

    If the reference has moved, resume the run with its new path in `kto.weights` and
    `checkpoint.allow_changes = ["kto.weights"]`; its weights must be identical.
    """

    api = (1, 0)
    key, data, member = "kto", "text_feedback", "desirable"
    gives: ClassVar[Mapping[str, str]] = {"task": "preferences"}
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {"head": ("token_logits",), "build_data": ("feedback",)}

    @section
    class Config(ReferenceSection):
        beta: Annotated[float, Gt(0)] = 0.1
        """Scale of the rewards: larger keeps the model nearer to its reference."""
        length_normalised: bool = False
        """Divide the log-probabilities of an answer, the model's and the reference's, by its number of tokens."""
        label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
        """Probability that an answer's label is wrong. With equal weights, it only makes the gradient of the loss
        smaller, by 1 − 2 × this. The SFT term is not smoothed."""
        sft_weight: Annotated[float, Ge(0)] = 0.0
        """Weight of a desirable answer's mean negative log-probability per token in the loss, as in `dpo`."""
        desirable_weight: Annotated[float, Gt(0)] = 1.0
        """Weight λ_D of a desirable answer."""
        undesirable_weight: Annotated[float, Gt(0)] = 1.0
        """Weight λ_U of an undesirable answer. If there are more of one kind, TRL advises that λ_D × the number of
        desirable answers be 1 to 4/3 times λ_U × the number of undesirable ones."""

    config: Config
    _observed: Mapping[str, Any] | None = None
    _task: JudgedAnswers
    _point: ReferencePoint | None = None

    def views(self, batch: Batch) -> tuple[Batch, ...]:
        from forge_train_kit.data.mismatched import split_mismatched

        return split_mismatched(batch)

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        yield from self.check_reference(config, "the loss", "kto.stored")
        weights = self.config.desirable_weight, self.config.undesirable_weight
        if self.config.label_smoothing >= (limit := min(weights) / sum(weights)):
            yield Problem(
                "kto.label_smoothing",
                f"must be less than {limit:.3g} with these weights: otherwise answers of the kind with the smaller one "
                "(kto.desirable_weight, kto.undesirable_weight) are learned as the other kind.",
            )

    @hookimpl
    def prepare_batch(self, job: Job) -> list[Preparation]:
        from ._kto import ReferencePoint

        self._point = self._point or ReferencePoint(job)
        return [*super().prepare_batch(job), PrepareStep(self._point)]

    @hookimpl
    def task(self, job: Job) -> Task:
        from ._kto import JudgedAnswers

        self._task = JudgedAnswers(job, self.config, lambda: self._observed, self.is_own_reference(job))
        return self._task

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        from ._kto import make_metrics

        self.look_at(model)
        if self._point is not None:
            self._point.bind(model, self._task)
        self._observed = make_metrics()
        return self._observed

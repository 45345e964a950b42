"""Direct preference optimisation: a language model learns which of two answers is better."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_train import (
    BatchPhase,
    ConfigError,
    ExtraModel,
    Ge,
    Gt,
    Lt,
    Plugin,
    PrepareBatch,
    Problem,
    Task,
    Volatile,
    hookimpl,
    section,
)
from forge_train.config.schema import FilePath

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Metric, Model, StepResult, Update
    from forge_train.config import Config as RunConfig

    from ._dpo import AnswerPairs
    from ._stored_reference import StoredReference

REFERENCE = "reference"
DIFFERS_BY = 20
"""The step by which a model has moved away from its reference, even with a long warm-up."""


class DPO(Plugin):
    """Preference pairs: the chosen answer is to become more likely than the rejected one.

    `sigmoid` is DPO (arXiv:2305.18290, eq. 7) and `ipo` is IPO (arXiv:2310.12036, eq. 17). Both compare the model with
    a frozen reference, by default the weights that the run starts from: with `lora`, the run's own model while its
    updates are switched off, and otherwise a second model. `simpo` (arXiv:2405.14734, eq. 6) and `orpo`
    (arXiv:2403.07691, eq. 6) need no reference, and no second model is built. The loss is the mean over the pairs of
    the global batch. Only the tokens of the answers count, including the one that ends the turn.

    An answer's reward is `beta` times its log-probability, less the reference's. `dpo.accuracy` is the share of pairs
    whose chosen answer has the higher reward, `dpo.margin` the mean difference of the two rewards,
    `dpo.chosen_reward` and `dpo.rejected_reward` are their means, and `dpo.chosen_log_probability` and
    `dpo.rejected_log_probability` those of the model's log-probabilities.

    If the reference has moved, resume the run with its new path in `dpo.weights` and
    `checkpoint.allow_changes = ["dpo.weights"]`; its weights must be identical.
    """

    api = (1, 0)
    gives: ClassVar[Mapping[str, str]] = {"task": "preferences"}
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {"head": ("token_logits",), "build_data": ("pairs",)}

    @section
    class Config:
        loss: Literal["sigmoid", "ipo", "simpo", "orpo"] = "sigmoid"
        """The loss of a pair."""
        beta: Annotated[float, Gt(0)] = 0.1
        """Scale of the rewards; IPO's τ; for `orpo`, the weight λ of the odds ratio. With `simpo`, the default is
        2."""
        length_normalised: bool = False
        """Divide each answer's log-probability by its number of tokens. With `simpo`, `orpo` and `ipo`, the default is
        true; for `ipo` as in TRL, while the paper's equation has sums."""
        label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
        """Probability that the two answers of a pair are swapped (conservative DPO), for `sigmoid` and `simpo`."""
        target_margin: Annotated[float, Ge(0)] = 0.0
        """SimPO's γ, by which the chosen reward should exceed the rejected one. With `simpo`, the default is 1."""
        sft_weight: Annotated[float, Ge(0)] = 0.0
        """Weight of the chosen answer's mean negative log-probability per token in the loss (arXiv:2404.19733, eq. 1).
        `orpo` contains it with weight 1."""
        weights: Annotated[str, FilePath()] = ""
        """The reference: a run, or a checkpoint; empty for `train.init_from`."""
        reference: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
        """Sections of the reference that differ from the model's, as in `[dpo.reference.decoder]`."""
        without: tuple[str, ...] = ()
        """Plugins that take no part in the reference. Those that tune a model, as `lora` does, never do."""
        stored: Annotated[str, FilePath(), Volatile()] = ""
        """File of the reference's log-probabilities. If it doesn't exist, the first step computes it for all pairs; a
        run that finds it loads no reference, so it needs neither its memory nor its time, and may be a pipeline."""
        chunk: Annotated[int, Ge(0)] = 0
        """Tokens whose logits exist at once; 0 chooses by vocabulary and batch."""

    config: Config
    _observed: Mapping[str, Metric] | None = None
    _task: AnswerPairs
    _model: Model
    _stored: StoredReference | None = None

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        per_token = {} if config.loss == "sigmoid" else {"dpo.length_normalised": True}
        return per_token | ({"dpo.beta": 2.0, "dpo.target_margin": 1.0} if config.loss == "simpo" else {})

    @property
    def _compares(self) -> bool:
        """True if the loss needs a reference."""
        return self.config.loss in ("sigmoid", "ipo")

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        mine = self.config
        unused = {
            "label_smoothing": mine.loss in ("ipo", "orpo"),
            "target_margin": mine.loss != "simpo",
            **dict.fromkeys(("weights", "reference", "without", "stored"), not self._compares),
        }
        for name in (name for name, idle in unused.items() if idle and getattr(mine, name)):
            yield Problem(f"dpo.{name}", f"has no effect with dpo.loss = {mine.loss!r}.")
        if mine.loss == "orpo" and mine.sft_weight:
            yield Problem("dpo.sft_weight", "has no effect with dpo.loss = 'orpo', which contains this term.")
        if self._compares:
            yield from self._check_reference(config)

    def _check_reference(self, config: RunConfig) -> Iterator[Problem]:
        start, weights = config.train.init_from, self.config.weights or config.train.init_from
        stored = self.config.stored
        if config.parallel.pp > 1 and not self._is_stored():
            yield Problem(
                "dpo.stored" if stored else "dpo.loss",
                f"{self.config.loss!r} needs a reference, which a pipeline can't run beside the model; let a run with "
                f"parallel.pp = 1 and train.steps = 1 compute {stored or 'a file for dpo.stored'} first, or choose "
                "simpo or orpo.",
            )
        if not weights:
            yield Problem(
                "dpo.weights",
                "the run starts from random weights, which can't be its reference; name a model to start from (forge "
                "train MODEL, or train.init_from), or the run or checkpoint of another reference.",
                data=True,
            )
        elif (Path(weights) / "config.json").is_file():
            yield Problem(
                "dpo.weights" if self.config.weights else "train.init_from",
                f"the reference is read from a run or a checkpoint, and {weights} is a Hugging Face folder; `forge "
                f"train {weights}` or `forge checkpoint import` makes a checkpoint of it.",
            )
        if start and config.train.init_map and not self.config.weights:
            yield Problem(
                "train.init_map", "changes the model and not its reference; set dpo.weights to a checkpoint of it."
            )

    @hookimpl
    def extra_models(self, job: Job) -> Iterable[ExtraModel]:
        from forge_train_kit.facts import tuners

        if self._compares and not self._is_own_reference(job) and not job.dist.on_main(self._is_stored):
            mine = self.config
            weights = mine.weights or job.config.train.init_from
            yield ExtraModel(REFERENCE, mine.reference, weights, without=(*mine.without, *tuners(job)))

    def _is_stored(self) -> bool:
        return bool(self.config.stored) and Path(self.config.stored).is_file()

    @hookimpl
    def prepare_batch(self, job: Job) -> PrepareBatch | None:
        if not self.config.stored:
            return None
        from ._stored_reference import StoredReference

        self._stored = self._stored or StoredReference(job, self.config)
        return PrepareBatch(BatchPhase.MASK, self._stored)

    @hookimpl
    def task(self, job: Job) -> Task:
        from ._dpo import AnswerPairs

        own = self._compares and self._is_own_reference(job)
        self._task = AnswerPairs(job, self.config, lambda: self._observed, own)
        return self._task

    def _is_own_reference(self, job: Job) -> bool:
        """True if the reference is the model itself, with the updates of its adapters switched off."""
        from forge_train_kit.facts import SWITCHES, tuners

        mine, added = self.config, tuners(job, adding=True)
        switches = all(SWITCHES.of(job.hooks.enabled[name].cls) for name in added)
        return bool(added) and switches and not (mine.weights or mine.reference or mine.without or mine.stored)

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        from forge_train_kit.metrics import Mean

        from ._dpo import METRICS

        self._observed = {name: Mean() for name in METRICS}
        return self._observed

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """Compare the vocabularies; of a model that is its own reference, see that only its updates are trained.

        Raises:
            ConfigError: it is not so.
        """
        from forge_train_kit.model_files import expect_same_words

        self._model = model
        if self._compares and self._is_own_reference(job):
            self._check_trained(model)
        if (reference := job.models.get(REFERENCE)) is None:
            return
        mine, theirs = (one.parts[-1].get_submodule("head").out_features for one in (model, reference))
        if mine != theirs:
            raise ConfigError(
                f"dpo.reference: the reference's vocabulary has {theirs:,} tokens, but the model's has {mine:,}; they "
                "must be equal."
            )
        expect_same_words(job, job.extra[REFERENCE].spec.weights, "dpo.weights")

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        """See that a model that is its own reference begins as the reference.

        Raises:
            ConfigError: it begins with updates.
        """
        from forge_train.base.format import format_list
        from forge_train_kit.model import updated_already

        taken = all(one.grad is None for one in update.parameters)  # by an optimizer that steps in the backward pass
        if update.step == 1 and self._task.own_reference and not taken and (found := updated_already(self._model)):
            raise ConfigError(
                f"dpo.weights: the reference is the model without its updates, and the run begins with some of "
                f"{format_list(found, 2)}, so it is not where the run starts. Put that adapter in lora.beneath, "
                "start from the tuned model merged (forge checkpoint export), or name a reference.",
                key="dpo.weights",
            )

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        """See that the updates of a model that is its own reference are switched off.

        Raises:
            ConfigError: none of its scores ever differed from the reference's.
        """
        if step.step == DIFFERS_BY and self._task.own_reference and not self._task.moved:
            raise ConfigError(
                f"dpo: after {step.step} steps the reference still scores every answer as the model does. Its adapter "
                "is not switched off in `without_updates` (the fact hf.switches), or nothing is learned.",
            )

    def _check_trained(self, model: Model) -> None:
        from forge_train.base.format import format_list

        trained = [
            name
            for name, module in model.named_modules()
            if not getattr(module, "updates_on", False)
            and any(one.requires_grad for one in module.parameters(recurse=False))
        ]
        if trained:
            raise ConfigError(
                f"dpo.weights: the reference is the model without its updates, and {format_list(trained, 3)} "
                "is trained beside them; name the checkpoint that the run starts from, of which a copy is then made.",
                key="dpo.weights",
            )

"""Direct preference optimisation: a language model learns which of two answers is better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_train import Ge, Gt, Lt, Problem, Task, hookimpl, section
from forge_train_kit.reference.plugin import ReferencePlugin, ReferenceSection

if TYPE_CHECKING:
    from forge_train import Job, Metric, Model
    from forge_train.config import Config as RunConfig


class DPO(ReferencePlugin):
    """Preference pairs: the chosen answer is to become more likely than the rejected one.

    `sigmoid` is DPO (arXiv:2305.18290, eq. 7) and `ipo` is IPO (arXiv:2310.12036, eq. 17). Both compare the model with
    a frozen reference, by default the weights that the run starts from: with `lora`, the run's own model while its
    updates are switched off, and otherwise a second model. `simpo` (arXiv:2405.14734, eq. 6) and `orpo`
    (arXiv:2403.07691, eq. 6) need no reference, and no second model is built. The loss is the mean over the pairs of
    the global batch. Only the tokens of the answers count, including the one that ends the turn.

    An answer's reward is `beta` times its log-probability, less the reference's. `dpo.accuracy` is the share of pairs
    whose chosen answer has the higher reward, `dpo.margin` the mean difference of the two rewards,
    `dpo.chosen_reward` and `dpo.rejected_reward` are their means, and `dpo.chosen_log_probability` and
    `dpo.rejected_log_probability` those of the model's log-probabilities. With a reference, `dpo.kl` estimates in nats
    how far the model is from it: the mean of r² / 2 over the answers of both kinds, with r the log-probability of the
    whole answer less the reference's (k2 of Schulman, http://joschu.net/blog/kl-approx.html).

    If the reference has moved, resume the run with its new path in `dpo.weights` and
    `checkpoint.allow_changes = ["dpo.weights"]`; its weights must be identical.
    """

    api = (1, 0)
    key, data, member = "dpo", "text_pairs", "member"
    facts = {"task.packed_pairs": True}
    gives: ClassVar[Mapping[str, str]] = {"task": "preferences"}
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {"head": ("token_logits",), "build_data": ("pairs",)}

    @section
    class Config(ReferenceSection):
        loss: Literal["sigmoid", "ipo", "simpo", "orpo"] = "sigmoid"
        """The loss of a pair."""
        beta: Annotated[float, Gt(0)] = 0.1
        """Scale of the rewards; IPO's τ; for `orpo`, the weight λ of the odds ratio. With `simpo`, the default is
        2."""
        length_normalised: bool = False
        """Divide each answer's log-probability by its number of tokens. With `simpo`, `orpo` and `ipo`, the default is
        true; for `ipo` as in TRL, while the paper's equation has sums."""
        label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
        """Probability that the two answers of a pair are swapped, as in conservative DPO. The SFT term is not
        smoothed."""
        target_margin: Annotated[float, Ge(0)] = 0.0
        """SimPO's γ, by which the chosen reward should exceed the rejected one. With `simpo`, the default is 1."""
        sft_weight: Annotated[float, Ge(0)] = 0.0
        """Weight of the chosen answer's mean negative log-probability per token in the loss (arXiv:2404.19733, eq. 1).
        `orpo` contains it with weight 1."""

    config: Config
    _observed: Mapping[str, Metric] | None = None

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        per_token = {} if config.loss == "sigmoid" else {"dpo.length_normalised": True}
        return per_token | ({"dpo.beta": 2.0, "dpo.target_margin": 1.0} if config.loss == "simpo" else {})

    @property
    def compares(self) -> bool:
        return self.config.loss in ("sigmoid", "ipo")

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        mine = self.config
        unused = {
            "target_margin": mine.loss != "simpo",
            **dict.fromkeys(("weights", "reference", "without", "stored"), not self.compares),
        }
        for name in (name for name, idle in unused.items() if idle and getattr(mine, name)):
            yield Problem(f"dpo.{name}", f"has no effect with dpo.loss = {mine.loss!r}.")
        if mine.loss == "orpo" and mine.sft_weight:
            yield Problem("dpo.sft_weight", "has no effect with dpo.loss = 'orpo', which contains this term.")
        if self.compares:
            yield from self.check_reference(config, repr(mine.loss), "dpo.loss", ", or choose simpo or orpo")

    @hookimpl
    def task(self, job: Job) -> Task:
        from ._dpo import AnswerPairs

        own = self.compares and self.is_own_reference(job)
        self._task = AnswerPairs(job, self.config, lambda: self._observed, own)
        return self._task

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        from forge_train_kit.metrics import Mean

        from ._dpo import METRICS

        self.look_at(model)
        self._observed = {name: Mean() for name in (*METRICS, *(["kl"] if self.compares else []))}
        return self._observed

"""Reinforcement learning from a reward that can be computed, on the public contract alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_train import FilePath, Ge, Gt, Job, Le, Lt, Problem, Task, Volatile, hookimpl, section
from forge_train_kit.contract import ExtraModel
from forge_train_kit.reference.plugin import ReferencePlugin, ReferenceSection

if TYPE_CHECKING:
    import torch

    from forge_train import CheckpointEvent, Finished, Loader, Metric, Model
    from forge_train.config import Config as RunConfig

    from ._grpo.rollouts import Rollouts

Variant = Literal["grpo", "dr_grpo", "dapo"]
CLIP: Mapping[str, tuple[float, float]] = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28)}
"""Clipping below and above 1 of the variants' papers."""


class GRPO(ReferencePlugin):
    """Reinforcement learning from a checkable reward: of a group of answers, the better ones become more likely.

    Before a step, the model that is trained answers each prompt `group` times, with its weights of that moment. An
    answer's advantage is its reward less the group's mean. The step learns it from all tokens of the answer, the one
    that ends it included, with the log-probabilities of the distribution that they were drawn from.

    - `grpo` (arXiv:2402.03300, eq. 3) divides advantages by the group's standard deviation, and takes the mean over the
      tokens of each answer, then over answers.
    - `dr_grpo` (arXiv:2503.20783) does neither: the sum over an answer's tokens is divided by `tokens`, the same for
      all.
    - `dapo` (arXiv:2503.14476) takes the mean over all tokens, clips further above than below, and replaces prompts
      whose answers all have the same reward by others, up to `rounds` times; groups that are still without a signal are
      left out. Its penalty for long answers is `overlong`.

    The reward is a function (`reward`), a task of reasoning-gym (`gym`), or a model that was trained by `reward`
    (`reward_model`), which reads the prompt, the answer and its end.

    `kl` adds the divergence from a reference (k3 of Schulman, http://joschu.net/blog/kl-approx.html), by default the
    weights that the run starts from: with `lora`, the run's own model while its updates are switched off, otherwise a
    second model. With `stale`, a rollout serves several steps, and the ratio of the probabilities of each token, now
    and when it was drawn, is clipped (arXiv:1707.06347, eq. 7). The ratio of fresh answers is exactly 1.

    With `top_k`, `top_p` or `min_p`, in this order as in `forge generate`, the tokens that could be drawn are kept with
    each drawn one. It is learned with its probability among these alone, by the model, by the reference, and when it is
    stale: what could not be drawn gets no gradient. `repetition_penalty` changes logits before all of these, and
    is part of the learned distribution too.

    Of all answers that were generated, `grpo.reward` is the mean reward, `grpo.reward_std` the mean of the standard
    deviations of the groups, `grpo.no_signal` the share of groups whose answers have the same reward,
    `grpo.answer_tokens` the mean length and `grpo.truncated` the share that did not end by `tokens`. Of the answers
    that a step learns, `grpo.entropy` is the mean entropy of the distributions that tokens were drawn from, in nats,
    `grpo.kl` the mean k3, `grpo.clipped` the share of tokens whose ratio was clipped, and `grpo.drift` the mean
    difference between a fresh token's log-probability when it was drawn and when it is learned: rounding, and nothing
    else. Evaluations give the metrics of held-out prompts. Some answers of each rollout are kept in
    `artifacts/samples.jsonl`, which `forge runs report` shows.
    """

    api = (1, 0)
    key, data, member = "grpo", "grpo", ""
    requires = ("tokenizer",)
    gives: ClassVar[Mapping[str, str]] = {"task": "answers", "build_data": "answers"}
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {"head": ("token_logits",), "build_data": ("answers",)}

    @section
    class Config(ReferenceSection):
        prompts: str | tuple[str, ...] = ""
        """Files, folders, patterns or addresses of records with a `prompt`, a text, or `messages`, a conversation that
        the model is to answer. The reward gets each record."""
        held_out: Annotated[float, Ge(0), Lt(1)] = 0.02
        """Share of the prompts that is kept for evaluation."""
        template: str = ""
        """The chat template of `messages`: `chatml`, `llama3`, `plain`, a file, or the name of one of the tokenizer's;
        empty for its own."""
        reward: Annotated[str, FilePath(words=("exact",), dotted=True)] = "exact"
        """The reward: `exact` is 1 if the answer is the text in the record's field `answer` (white space at both ends
        aside), and 0 otherwise; or your function, as `package.module:function` or `file.py:function`."""
        reward_model: Annotated[str, FilePath()] = ""
        """A run or a checkpoint of `reward`, whose rewards take the place of `reward`: those of the prompt, the answer
        and the end, as a text, or as a chat that the template beside its weights writes, or else `template`."""
        reward_weight: Annotated[float, Ge(0)] = 0.0
        """With `reward_model`: weight of `reward`, or of the task's reward, which is added to the model's."""
        gym: str = ""
        """A task of reasoning-gym, such as `chain_sum`, in the place of `prompts` and `reward`; needs
        `pip install 'forge-train[rl]'`."""
        gym_options: Mapping[str, Any] = field(default_factory=dict)
        """Options of the task: `{ size = 1000, max_terms = 2 }`. The seed is the run's, if they name none."""
        group: Annotated[int, Ge(2)] = 8
        """Answers to each prompt."""
        tokens: Annotated[int, Gt(0)] = 128
        """Longest answer."""
        temperature: Annotated[float, Gt(0)] = 1.0
        """Divides the logits, when answers are drawn and when they are learned."""
        top_k: Annotated[int, Ge(0)] = 0
        """Tokens are drawn among this many of the likeliest, and those that are as likely as the last; 0 for all."""
        top_p: Annotated[float, Gt(0), Le(1)] = 1.0
        """Tokens are drawn among the fewest likeliest whose probabilities reach this sum."""
        min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
        """Tokens are drawn among those whose probability is at least this share of the likeliest one's; 0 for all."""
        repetition_penalty: Annotated[float, Gt(0)] = 1.0
        """Divides the positive logits, and multiplies the negative ones, of tokens that the prompt or the answer has
        already, when answers are drawn and when they are learned; 1 for none."""
        batch: Annotated[int, Gt(0), Volatile()] = 32
        """Answers that are generated side by side on each data-parallel rank."""
        variant: Variant = "grpo"
        """The loss."""
        stale: Annotated[int, Ge(0)] = 0
        """Steps that an answer may be old when it is learned: a rollout serves 1 + `stale` steps."""
        clip_low: Annotated[float, Gt(0), Lt(1)] = 0.2
        """Largest part by which a ratio counts as smaller than 1."""
        clip_high: Annotated[float, Gt(0)] = 0.2
        """The same above 1. With `dapo`, the default is 0.28."""
        kl: Annotated[float, Ge(0)] = 0.0
        """Weight of the divergence from the reference; 0 needs none."""
        rounds: Annotated[int, Ge(1)] = 1
        """Times that a rollout may take other prompts for those without a signal. With `dapo`, the default is 4."""
        overlong: Annotated[int, Ge(0)] = 0
        """Tokens at the end of the longest answer in which the reward falls, evenly, by 1 (DAPO's soft punishment)."""
        samples: Annotated[int, Ge(0), Volatile()] = 4
        """Answers of each rollout that are kept."""

    config: Config
    _observed: Mapping[str, Metric] | None = None
    _rollouts: Rollouts | None = None

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        return {"grpo.clip_high": CLIP["dapo"][1], "grpo.rounds": 4} if config.variant == "dapo" else {}

    @property
    def compares(self) -> bool:
        return self.config.kl > 0

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        mine, train = self.config, config.train
        yield from self._check_rewards()
        sizes = [("train.global_batch", (1 + mine.stale) * train.global_batch, "a rollout")]
        if train.evaluate_every:
            sizes += [("train.evaluate_batches", train.evaluate_batches * train.global_batch, "an evaluation")]
        for key, rows, what in sizes:
            if rows % mine.group:
                yield Problem(
                    key, f"{what} has {rows} answers, which are no whole groups of grpo.group = {mine.group}."
                )
        if train.batch_warmup:
            yield Problem("train.batch_warmup", "must be 0 with grpo: a rollout serves steps of one size.")
        for key in (key for key in ("kl", "reward_model") if config.parallel.pp > 1 and getattr(mine, key)):
            yield Problem(
                f"grpo.{key}", "needs a second model, which a pipeline can't run beside the first; set parallel.pp = 1."
            )
        if mine.top_k == 1:
            yield Problem("grpo.top_k", "must be 0 or at least 2: a group drawn from one token has equal answers.")
        if mine.overlong > mine.tokens:
            yield Problem("grpo.overlong", f"must be at most grpo.tokens = {mine.tokens}.")
        yield from self._unused()
        if self.compares and config.parallel.pp == 1:
            yield from self.check_reference(config, "its divergence", "grpo.kl")

    def _check_rewards(self) -> Iterator[Problem]:
        from ._grpo.rewards import EXACT, find

        mine = self.config
        if not (mine.prompts or mine.gym):
            yield Problem("grpo.prompts", "required: your prompts, such as prompts.jsonl.", data=True)
        if text := find(mine.reward)[1]:
            yield Problem("grpo.reward", text)
        if mine.reward_weight and not mine.reward_model:
            yield Problem("grpo.reward_weight", "has no effect without grpo.reward_model.")
        if mine.reward_model and not mine.reward_weight and mine.reward != EXACT:
            yield Problem("grpo.reward", "has no effect with grpo.reward_model, unless grpo.reward_weight is above 0.")
        if mine.gym:
            for key in (key for key, usual in (("prompts", ""), ("reward", EXACT)) if getattr(mine, key) != usual):
                yield Problem(f"grpo.{key}", "has no effect with grpo.gym, whose tasks have both; remove one.")
        elif mine.gym_options:
            yield Problem("grpo.gym_options", "has no effect without grpo.gym.")

    def _unused(self) -> Iterator[Problem]:
        mine = self.config
        low, high = CLIP[mine.variant]
        if not mine.stale and (mine.clip_low, mine.clip_high) != (low, high):
            key = "clip_low" if mine.clip_low != low else "clip_high"
            yield Problem(f"grpo.{key}", "has no effect with grpo.stale = 0: the ratios of fresh answers are 1.")
        for name in ("weights", "reference", "without") if not self.compares else ():
            if getattr(mine, name):
                yield Problem(f"grpo.{name}", "has no effect with grpo.kl = 0.")
        if mine.stored:
            yield Problem("grpo.stored", "can't be used: nobody knows the answers before they are generated.")
        if mine.rounds > 1 and mine.variant != "dapo":
            yield Problem("grpo.rounds", "has an effect with grpo.variant = 'dapo' only.")

    @hookimpl
    def extra_models(self, job: Job) -> Iterable[ExtraModel]:
        from forge_train_kit.own_sections import saved_model

        from ._grpo.judge import JUDGE, KEY

        yield from super().extra_models(job)
        if weights := self.config.reward_model:
            yield saved_model(job, JUDGE, weights, head="rewards", key=KEY)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """Compare the vocabularies of the extra models with the run's.

        Raises:
            ConfigError: they differ.
        """
        from forge_train_kit.model_files import expect_same_words

        super().on_start(job, model, optimizer)
        if weights := self.config.reward_model:
            expect_same_words(job, weights, "grpo.reward_model")

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from ._grpo.loader import AnswerLoader
        from ._grpo.rollouts import Rollouts

        if self._rollouts is None:
            self._rollouts = Rollouts(job, self.config, self, lambda: self._observed)
        loader = AnswerLoader(job, self._rollouts, split)
        if split == "train":
            self._loader = loader
        return loader

    @hookimpl
    def task(self, job: Job) -> Task:
        from ._grpo.task import Answers

        self._task: Any = Answers(
            job, self.config, lambda: self._observed, self.compares and self.is_own_reference(job)
        )
        return self._task

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        from forge_train_kit.metrics import Mean

        from ._grpo.rollouts import METRICS

        self.look_at(model)
        learned = ["entropy", "drift", *(["kl"] if self.compares else []), *(["clipped"] if self.config.stale else [])]
        self._observed = {name: Mean() for name in (*METRICS, *learned)}
        return self._observed

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.files import find
        from forge_train_kit.data.stages import counted, held_out

        mine = self.config
        known = mine.gym or counted(find(mine.prompts, key="grpo.prompts"))
        yield "source", f"{known}: prompts"
        yield "filter", held_out(mine.held_out, "prompts by their hash")
        yield "order", "another one in each epoch, by the run's seed"
        yield "pack", f"a row of {job.config.train.sequence} tokens for each answer, drawn by the model before the step"

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.kind == "saving" and self._rollouts is not None:
            self._rollouts.save_template()

    @hookimpl
    def on_end(self, finished: Finished) -> None:
        if self._rollouts is not None:
            self._rollouts.record_samples()

    def state_dict(self) -> dict[str, Any]:
        """The rollout that steps are taking answers from."""
        return self._loader.rollout.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_rollout(state)

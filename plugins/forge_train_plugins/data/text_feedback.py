"""Feedback as training data: an answer, and whether it is desirable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_train import Batch, ConfigError, Ge, Lt, Plugin, Problem, Volatile, hookimpl, section
from forge_train.contract.protocols import Loader
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from forge_train import CheckpointEvent, Finished, Job, Model
    from forge_train.config import Config as RunConfig
    from forge_train_kit.data.feedback import Answers
    from forge_train_kit.data.held_out import Side
    from forge_train_kit.data.prepare import Preparation
    from forge_train_kit.data.rows import Pieces


class TextFeedback(Plugin):
    """Answers that somebody judged, each alone: `{"prompt": …, "completion": …, "label": true}`.

    Each row is an answer after its prompt. `targets["desirable"]`, `[batch]`, is 1 for a desirable answer (label true)
    and 0 for an undesirable one; it is -1 in rows that fill a held-out batch and count for nothing. The labels are the
    tokens of the answer; all other labels are masked. `document_ids` is 0 for text; the padding after it has another
    id. Beside the rows, a batch has their prompts with answers of others, always the same: the targets
    `mismatched.inputs`, `mismatched.labels`, `mismatched.position_ids` and `mismatched.document_ids`
    (`forge_train_kit.data.mismatched` separates them). `kto` learns from feedback. Your own task declares
    `takes = {"build_data": ("feedback",)}`.
    """

    api = (1, 0)
    requires = ("tokenizer",)
    gives: ClassVar[Mapping[str, str]] = {"build_data": "feedback"}

    @section
    class Config:
        path: str | tuple[str, ...] = ""
        """Files, folders, patterns or addresses. Each record has a `label`, true or false, and a conversation:
        `prompt` and `completion` as strings or lists of messages, or `messages`, whose last one is the answer."""
        template: str = ""
        """The chat template; see `sft.template`. Exports get it with the tokenizer."""
        template_options: Mapping[str, Any] = field(default_factory=dict)
        """See `sft.template_options`."""
        split_special_tokens: bool = False
        """See `sft.split_special_tokens`."""
        rename: Mapping[str, str] = field(default_factory=dict)
        """See `sft.rename`."""
        roles: Mapping[str, str] = field(default_factory=dict)
        """See `sft.roles`."""
        long: Literal["refuse", "drop", "left", "right"] = "refuse"
        """Treatment of a text longer than a row: it ends the run, is left out, or loses tokens on its left or
        right."""
        held_out: Annotated[float, Ge(0), Lt(1)] = 0.02
        """Share of the answers kept for evaluation. All answers to a prompt are kept together."""
        shuffle: bool = True
        """Use a different order of the answers in every epoch."""
        cache: Annotated[str, Volatile()] = ""
        """Folder for cached tokens; empty means forge-train/text_feedback in $XDG_CACHE_HOME or ~/.cache."""

    config: Config
    _sides: Mapping[Side, Answers] | None = None
    _epoch: Pieces | None = None
    _job: Job | None = None

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if not self.config.path:
            yield Problem("text_feedback.path", "required: your judged answers, such as feedback.jsonl.", data=True)

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities | None:
        return KernelCapabilities(documents=True)

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from forge_train_kit.data.feedback import FeedbackRows
        from forge_train_kit.data.fit import fitted
        from forge_train_kit.data.loader import StreamLoader, warn_of_few
        from forge_train_kit.data.mismatched import DESIRABLE
        from forge_train_kit.data.stream import HELD_OUT_SEED, Ordered

        answers, sequence = self._open(job)[split], job.config.train.sequence
        pieces = fitted(answers, sequence, long=self.config.long, packing="pad", key="text_feedback")
        rows = FeedbackRows(answers, sequence, pieces, pad=hookspecs.tokenizer(job).end or 0)
        held_out = split == "validation"
        if rows.count < 2:
            which = (
                "evaluation: raise text_feedback.held_out, or set train.evaluate_every = 0" if held_out else "training"
            )
            raise ConfigError(f"text_feedback.path: {self.config.path} leaves fewer than two answers for {which}.")
        if not held_out:
            self._epoch = pieces
            self._check_both(answers.desirable[pieces.document])
        seed = HELD_OUT_SEED if held_out else job.seed if self.config.shuffle else None
        stream = Ordered(rows, seed, key="text_feedback", fixed=held_out)
        warn_of_few(stream.samples, job)
        return StreamLoader(stream, job, target=DESIRABLE)

    def _check_both(self, desirable: NDArray[np.bool_]) -> None:
        """Refuse answers of one kind, of those that are in rows.

        Raises:
            ConfigError: with their label.
        """
        good, count = int(desirable.sum()), len(desirable)
        if good in (0, count):
            label, other = ("true", "undesirable") if good else ("false", "desirable")
            raise ConfigError(
                f"text_feedback.path: all {count:,} answers of {self.config.path} have the label {label}; "
                f"add {other} ones, with which they are compared."
            )

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.files import find
        from forge_train_kit.data.manifest import FILE, open_prepared
        from forge_train_kit.data.stages import counted, held_out, order

        config = self.config
        yield "render", f"chat template: {config.template or 'of the tokenizer'}; learned: the answer"
        yield "filter", held_out(config.held_out, "answers by the hash of their prompt")
        yield "filter", f"answers longer than a row with their prompt: {config.long}"
        yield "order", order(job, shuffle=config.shuffle)
        yield "pack", "one answer in a row; beside it, its prompt with the answer of another"
        try:
            files, known = find(config.path, key="text_feedback.path"), ""
            wanted = self._wanted(job)
            if (wanted.out / FILE).is_file():
                found = open_prepared(wanted.out, key="text_feedback.path").sides
                known = "; " + ", ".join(f"{one.count // 2:,} answers for {side}" for side, one in found.items())
            yield "source", f"{counted(files)}{known}"
            yield "decode", "each record is an answer with a label"
        except ConfigError as error:
            yield "source", str(error)

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from dataclasses import replace

        import torch

        from forge_train_kit.data.loader import example
        from forge_train_kit.data.mismatched import DESIRABLE, with_mismatched

        made = example(job, isolate=True)
        desirable = torch.arange(job.config.train.micro_batch) % 2
        return with_mismatched(replace(made, targets={DESIRABLE: desirable}), made)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """Say how much is learned."""
        from forge_train_kit.data import progress
        from forge_train_kit.data.learned import tell_learned

        if job.dist.main and self._sides is not None and self._epoch is not None:
            desirable = self._sides["train"].desirable[self._epoch.document]
            good, bad = int(desirable.sum()), int((~desirable).sum())
            tell_learned("text_feedback", "answers", self._sides, self._epoch, job)
            progress.tell(f"text_feedback: {good:,} answers are desirable, and {bad:,} are not")
        self._job = job

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        """Complete the tokenizer's files, which exports and `forge generate` read."""
        from forge_train_kit.data.chats import save_template

        if event.kind == "saving" and self._job is not None:
            save_template(self._job, self.config.template, self.config.template_options)

    @hookimpl
    def on_end(self, finished: Finished, job: Job) -> None:
        from forge_train_kit.data.chats import save_question

        if finished.outcome == "done" and job.hooks.gives("head") == "token_logits":
            save_question(job, self)

    def _open(self, job: Job) -> Mapping[Side, Answers]:
        if self._sides is None:
            from forge_train_kit.data.feedback import Answers
            from forge_train_kit.data.prepare.cached import obtained

            found = obtained(self._wanted(job), job, "text_feedback").sides
            self._sides = {side: Answers(documents) for side, documents in found.items()}
        return self._sides

    def _wanted(self, job: Job) -> Preparation:
        from forge_train_kit.data.prepare.cached import wanted_of

        config = self.config
        return wanted_of(
            job,
            config.path,
            config.cache,
            "text_feedback",
            held_out=config.held_out,
            chat=True,
            feedback=True,
            template=config.template,
            template_options=config.template_options,
            rename=config.rename,
            roles=config.roles,
            split_special_tokens=config.split_special_tokens,
        )

"""Feedback as training data: an answer, and whether it is desirable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from forge_train import Batch, ConfigError, hookimpl, section
from forge_train_kit.data.mismatched import DESIRABLE, with_mismatched
from forge_train_kit.data.preferences import PreferencePlugin, PreferenceSection

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Loader, Model
    from forge_train_kit.data.documents import Documents
    from forge_train_kit.data.feedback import Answers
    from forge_train_kit.data.held_out import Side
    from forge_train_kit.data.rows import Pieces
    from forge_train_kit.data.stream import Stream


class TextFeedback(PreferencePlugin):
    """Answers that somebody judged, each alone: `{"prompt": …, "completion": …, "label": true}`.

    A record has a `label`, true or false, and a conversation: `prompt` and `completion` as strings or lists of
    messages, or `messages`, whose last one is the answer. All answers to a prompt are held out together, or none.

    Each row is an answer after its prompt. `targets["desirable"]`, `[batch]`, is 1 for a desirable answer (label true)
    and 0 for an undesirable one; it is -1 in rows that fill a held-out batch and count for nothing. The labels are the
    tokens of the answer; all other labels are masked. `document_ids` is 0 for text; the padding after it has another
    id. Beside the rows, a batch has their prompts with answers of others, always the same: the targets
    `mismatched.inputs`, `mismatched.labels`, `mismatched.position_ids` and `mismatched.document_ids`
    (`forge_train_kit.data.mismatched` separates them). `kto` learns from feedback. Your own task declares
    `takes = {"build_data": ("feedback",)}`.
    """

    gives: ClassVar[Mapping[str, str]] = {"build_data": "feedback"}
    key, unit, target = "text_feedback", "answers", DESIRABLE
    wants, too_few = "your judged answers, such as feedback.jsonl", "fewer than two answers"

    @section
    class Config(PreferenceSection):
        """Options of answers that were judged."""

    config: Config

    @hookimpl
    def build_data(self, job: Job, split: Side) -> Loader:
        loader = super().build_data(job, split)
        if split == "train" and not all(counts := self._judged()):
            label, other = ("true", "undesirable") if counts[0] else ("false", "desirable")
            raise ConfigError(
                f"text_feedback.path: all {sum(counts):,} answers of {self.config.path} have the label {label}; "
                f"add {other} ones, with which they are compared."
            )
        return loader

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.stages import held_out

        config = self.config
        yield "render", f"chat template: {config.template or 'of the tokenizer'}; learned: the answer"
        yield "filter", held_out(config.held_out, "answers by the hash of their prompt")
        yield "filter", f"answers longer than a row with their prompt: {config.long}"
        row = "one answer in a row; beside it, its prompt with the answer of another"
        yield from self.sources(job, "an answer with a label", row)

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from dataclasses import replace

        import torch

        from forge_train_kit.data.loader import example

        made = example(job, isolate=True)
        desirable = torch.arange(job.config.train.micro_batch) % 2
        return with_mismatched(replace(made, targets={DESIRABLE: desirable}), made)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """Say how much is learned, and how many answers are desirable."""
        from forge_train_kit.data import progress

        super().on_start(job, model, optimizer)
        if job.dist.main and self._epoch is not None:
            good, bad = self._judged()
            progress.tell(f"text_feedback: {good:,} answers are desirable, and {bad:,} are not")

    def records(self) -> Mapping[str, Any]:
        return {"feedback": True}

    def documents(self, found: Documents) -> Answers:
        from forge_train_kit.data.feedback import Answers

        return Answers(found)

    def stream(self, documents: Answers, sequence: int, pieces: Pieces, pad: int, **order: Any) -> Stream:
        from forge_train_kit.data.feedback import FeedbackRows
        from forge_train_kit.data.stream import Ordered

        return Ordered(FeedbackRows(documents, sequence, pieces, pad=pad), **order)

    def _judged(self) -> tuple[int, int]:
        """The numbers of desirable and of undesirable answers in the training rows."""
        assert self._sides is not None
        assert self._epoch is not None
        desirable = self._sides["train"].desirable[self._epoch.document]
        return int(desirable.sum()), int((~desirable).sum())

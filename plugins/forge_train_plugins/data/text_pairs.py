"""Pairs as training data: a better and a worse answer, or two texts that belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from forge_train import Batch, ConfigError, Problem, hookimpl, section
from forge_train.contract.batch import TOKENS
from forge_train_kit.data.preferences import PreferencePlugin, PreferenceSection
from forge_train_kit.facts import PACKED_PAIRS
from forge_train_kit.losses import ANSWERS

if TYPE_CHECKING:
    from forge_train import Job, Loader
    from forge_train.config import Config as RunConfig
    from forge_train_kit.data.documents import Documents
    from forge_train_kit.data.held_out import Side
    from forge_train_kit.data.rows import Pieces
    from forge_train_kit.data.stream import Stream


class TextPairs(PreferencePlugin):
    """Preference pairs, or pairs of texts for embeddings: each pair is two consecutive rows of a micro-batch.

    Rows 2i and 2i + 1 of a micro-batch are the chosen and the rejected answer, each after the prompt; or the anchor
    and its positive text. `targets["member"]`, `[batch]`, is 0 for the first row of a pair and 1 for the second. Where
    too few pairs are held out, copies fill an evaluation's batches: their `member` is -1, and they count for nothing.
    The labels are the tokens of the answer, or of the whole text; all other labels are masked. `document_ids` is 0 for
    text; the padding after it has another id. `dpo`, `reward` and `embed` learn from pairs. Your own task
    distinguishes the two rows, and declares `takes = {"build_data": ("pairs",)}`.

    With `packing = "best_fit"`, a row holds several pairs, the chosen answer of each before its rejected one. `member`
    is then `[batch, answers]`, where -1 fills rows with fewer answers, and the target `answers`, `[batch, sequence]`,
    has the number of each token's answer in its row. `dpo` learns from such rows; your own task does if it states the
    fact `task.packed_pairs`.
    """

    gives: ClassVar[Mapping[str, str]] = {"build_data": "pairs"}
    key, unit, target, group = "text_pairs", "pairs", "member", 2
    wants, too_few = "your pairs, such as preferences.jsonl", "no pair"

    @section
    class Config(PreferenceSection):
        kind: Literal["preference", "embedding"] = "preference"
        """`preference`: records with `prompt`, `chosen` and `rejected`, as strings or lists of messages. `embedding`:
        records with the texts `anchor` and `positive`."""
        packing: Literal["pad", "best_fit"] = "pad"
        """One text in a row; or `best_fit`, several preference pairs in a row, both answers of each. `long` is then
        about pairs that are longer than a row."""

    config: Config

    @property
    def chat(self) -> bool:  # type: ignore[override]
        return self.config.kind == "preference"

    @property
    def packing(self) -> str:  # type: ignore[override]
        return self.config.packing

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        yield from super().check_config(config)
        for name in ("template", "template_options", "split_special_tokens"):
            if not self.chat and getattr(self.config, name):
                yield Problem(f"text_pairs.{name}", "has no effect on texts (text_pairs.kind = 'embedding').")
        if self.packing != "pad":
            if not self.chat:
                yield Problem("text_pairs.packing", "texts (text_pairs.kind = 'embedding') take a row each; remove it.")
            return
        own = config.train.micro_batch
        written = config.as_written.get("train", {}).get("micro_batch", own)  # 0 is filled in later
        if written % 2:
            yield Problem("train.micro_batch", "must be even: a pair is two sequences of one micro-batch.")
        elif not written and (odd := [size for size in config.train.batches if size % 2]):
            yield Problem(
                "train.global_batch" if odd[0] == config.train.global_batch else "train.batch_warmup",
                f"{odd[0]} is odd, but a pair is two sequences of one micro-batch; set it to a multiple of 2 × the "
                "data-parallel ranks.",
            )

    @hookimpl
    def build_data(self, job: Job, split: Side) -> Loader:
        self._check_task(job)
        size = job.config.train.micro_batch  # 0 in a file is the rank's share, known only now
        if size % 2 and self.packing == "pad":
            raise ConfigError(
                f"train.micro_batch: {size} is odd, but a pair is two sequences of one micro-batch; set it to an even "
                "number."
            )
        return super().build_data(job, split)

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.stages import held_out

        config, chat = self.config, f"chat template: {self.config.template or 'of the tokenizer'}"
        yield "render", f"{chat}; learned: both answers" if self.chat else "texts as they are"
        yield "filter", held_out(config.held_out, "pairs by the hash of their first text")
        longer, order = "pairs", "chosen, rejected" if self.chat else "anchor, positive"
        row = f"several pairs in a row, each {order}"
        if self.packing == "pad":
            longer, row = "pairs with a member", f"one text in a row; a pair is two rows, {order}"
        yield "filter", f"{longer} longer than a row: {config.long}"
        yield from self.sources(job, "a pair", row)

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from dataclasses import replace

        import torch

        from forge_train_kit.data.loader import example

        made, member = example(job, isolate=True), torch.arange(job.config.train.micro_batch) % 2
        if self.packing == "pad":
            return replace(made, targets={"member": member})
        self._check_task(job)
        made = replace(made, targets={"member": torch.arange(2).repeat(len(member), 1)})
        return made.with_targets({ANSWERS: made.inputs}, TOKENS)

    def records(self) -> Mapping[str, Any]:
        return {"pairs": self.config.kind}

    def stream(self, documents: Documents, sequence: int, pieces: Pieces, pad: int, **order: Any) -> Stream:
        from forge_train_kit.data.paired import PackedPairs, Paired
        from forge_train_kit.data.rows import PackedRows
        from forge_train_kit.data.stream import Ordered

        if self.packing != "pad":
            return Ordered(PackedPairs(documents, sequence, pieces, pad=pad), **order)
        return Paired(PackedRows(documents, sequence, pieces, pad=pad), **order)

    def _check_task(self, job: Job) -> None:
        """Refuse packed pairs for a task that compares whole rows.

        Raises:
            ConfigError: it does.
        """
        task = job.hooks.provider("task")
        if self.packing != "pad" and task and not PACKED_PAIRS.of(job.hooks.plugins[task]):
            raise ConfigError(
                f"text_pairs.packing: plugin {task!r}, which provides the task, learns from pairs of rows (fact "
                "task.packed_pairs); set it to pad."
            )

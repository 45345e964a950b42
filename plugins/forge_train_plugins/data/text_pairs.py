"""Pairs as training data: a better and a worse answer, or two texts that belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from forge_train import Batch, ConfigError, Problem, hookimpl, section
from forge_train_kit.data.preferences import PreferencePlugin, PreferenceSection

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
    """

    gives: ClassVar[Mapping[str, str]] = {"build_data": "pairs"}
    key, unit, target, group = "text_pairs", "pairs", "member", 2
    wants, too_few = "your pairs, such as preferences.jsonl", "no pair"

    @section
    class Config(PreferenceSection):
        kind: Literal["preference", "embedding"] = "preference"
        """`preference`: records with `prompt`, `chosen` and `rejected`, as strings or lists of messages. `embedding`:
        records with the texts `anchor` and `positive`."""

    config: Config

    @property
    def chat(self) -> bool:  # type: ignore[override]
        return self.config.kind == "preference"

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        yield from super().check_config(config)
        for name in ("template", "template_options", "split_special_tokens"):
            if not self.chat and getattr(self.config, name):
                yield Problem(f"text_pairs.{name}", "has no effect on texts (text_pairs.kind = 'embedding').")
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
        if job.config.train.micro_batch % 2:  # 0 in a file is the rank's share, known only now
            raise ConfigError(
                f"train.micro_batch: {job.config.train.micro_batch} is odd, but a pair is two sequences of one "
                "micro-batch; set it to an even number."
            )
        return super().build_data(job, split)

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.stages import held_out

        config, chat = self.config, f"chat template: {self.config.template or 'of the tokenizer'}"
        yield "render", f"{chat}; learned: both answers" if self.chat else "texts as they are"
        yield "filter", held_out(config.held_out, "pairs by the hash of their first text")
        yield "filter", f"pairs with a member longer than a row: {config.long}"
        rows = "chosen, rejected" if self.chat else "anchor, positive"
        yield "pack", f"one text in a row; a pair is two rows, {rows}"
        yield from self.sources(job, "a pair")

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from dataclasses import replace

        import torch

        from forge_train_kit.data.loader import example

        return replace(example(job, isolate=True), targets={"member": torch.arange(job.config.train.micro_batch) % 2})

    def records(self) -> Mapping[str, Any]:
        return {"pairs": self.config.kind}

    def stream(self, documents: Documents, sequence: int, pieces: Pieces, pad: int, **order: Any) -> Stream:
        from forge_train_kit.data.paired import Paired
        from forge_train_kit.data.rows import PackedRows

        return Paired(PackedRows(documents, sequence, pieces, pad=pad), **order)

"""Pairs as training data: a better and a worse answer, or two texts that belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_train import Batch, ConfigError, Ge, Lt, Plugin, Problem, Volatile, hookimpl, section
from forge_train.contract.protocols import Loader
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities

if TYPE_CHECKING:
    import torch

    from forge_train import CheckpointEvent, Finished, Job, Model
    from forge_train.config import Config as RunConfig
    from forge_train_kit.data.documents import Documents
    from forge_train_kit.data.held_out import Side
    from forge_train_kit.data.prepare import Preparation
    from forge_train_kit.data.rows import Pieces


class TextPairs(Plugin):
    """Preference pairs, or pairs of texts for embeddings: each pair is two consecutive rows of a micro-batch.

    Rows 2i and 2i + 1 of a micro-batch are the chosen and the rejected answer, each after the prompt; or the anchor
    and its positive text. `targets["member"]`, `[batch]`, is 0 for the first row of a pair and 1 for the second. Where
    too few pairs are held out, copies fill an evaluation's batches: their `member` is -1, and they count for nothing.
    The labels are the tokens of the answer, or of the whole text; all other labels are masked. `document_ids` is 0 for
    text; the padding after it has another id. `dpo`, `reward` and `embed` learn from pairs. Your own task
    distinguishes the two rows, and declares `takes = {"build_data": ("pairs",)}`.
    """

    api = (1, 0)
    requires = ("tokenizer",)
    gives: ClassVar[Mapping[str, str]] = {"build_data": "pairs"}

    @section
    class Config:
        path: str | tuple[str, ...] = ""
        """Files, folders, patterns or addresses; each record holds one pair."""
        kind: Literal["preference", "embedding"] = "preference"
        """`preference`: records with `prompt`, `chosen` and `rejected`, as strings or lists of messages. `embedding`:
        records with the texts `anchor` and `positive`."""
        template: str = ""
        """The chat template for preference pairs; see `sft.template`. Exports get it with the tokenizer."""
        template_options: Mapping[str, Any] = field(default_factory=dict)
        """See `sft.template_options`."""
        split_special_tokens: bool = False
        """See `sft.split_special_tokens`."""
        rename: Mapping[str, str] = field(default_factory=dict)
        """See `sft.rename`."""
        roles: Mapping[str, str] = field(default_factory=dict)
        """See `sft.roles`."""
        long: Literal["refuse", "drop", "left", "right"] = "refuse"
        """Treatment of a pair with a text longer than a row: the pair ends the run or is left out, or its
        texts that are too long lose tokens on their left or right."""
        held_out: Annotated[float, Ge(0), Lt(1)] = 0.02
        """Share of the pairs kept for evaluation."""
        shuffle: bool = True
        """Use a different order of the pairs in every epoch."""
        cache: Annotated[str, Volatile()] = ""
        """Folder for cached tokens; empty means forge-train/text_pairs in $XDG_CACHE_HOME or ~/.cache."""

    config: Config
    _sides: Mapping[Side, Documents] | None = None
    _epoch: Pieces | None = None
    _job: Job | None = None

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if not self.config.path:
            yield Problem("text_pairs.path", "required: your pairs, such as preferences.jsonl.", data=True)
        if self.config.template and self.config.kind == "embedding":
            yield Problem("text_pairs.template", "has no effect on texts (text_pairs.kind = 'embedding').")
        if self.config.template_options and self.config.kind == "embedding":
            yield Problem("text_pairs.template_options", "has no effect on texts (text_pairs.kind = 'embedding').")
        if self.config.split_special_tokens and self.config.kind == "embedding":
            yield Problem("text_pairs.split_special_tokens", "has no effect on texts (text_pairs.kind = 'embedding').")
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
    def kernel_needs(self) -> KernelCapabilities | None:
        return KernelCapabilities(documents=True)

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from forge_train_kit.data.fit import fitted
        from forge_train_kit.data.loader import StreamLoader, warn_of_few
        from forge_train_kit.data.paired import Paired
        from forge_train_kit.data.rows import PackedRows
        from forge_train_kit.data.stream import HELD_OUT_SEED

        if job.config.train.micro_batch % 2:  # 0 in a file is the rank's share, known only now
            raise ConfigError(
                f"train.micro_batch: {job.config.train.micro_batch} is odd, but a pair is two sequences of one "
                "micro-batch; set it to an even number."
            )
        documents, sequence = self._open(job)[split], job.config.train.sequence
        pieces = fitted(documents, sequence, long=self.config.long, packing="pad", key="text_pairs", together=2)
        if split == "train":
            self._epoch = pieces
        rows = PackedRows(documents, sequence, pieces, pad=hookspecs.tokenizer(job).end or 0)
        if not rows.count:
            which = (
                "training"
                if split == "train"
                else "evaluation: raise text_pairs.held_out, or set train.evaluate_every = 0"
            )
            raise ConfigError(f"text_pairs.path: {self.config.path} leaves no pair for {which}.")
        held_out = split == "validation"
        seed = HELD_OUT_SEED if held_out else job.seed if self.config.shuffle else None
        stream = Paired(rows, seed, key="text_pairs", fixed=held_out)
        warn_of_few(stream.samples, job)
        return StreamLoader(stream, job, target="member")

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.files import find
        from forge_train_kit.data.manifest import FILE, open_prepared
        from forge_train_kit.data.stages import counted, held_out, order

        config = self.config
        preference = config.kind == "preference"
        yield (
            "render",
            f"chat template: {config.template or 'of the tokenizer'}; learned: both answers"
            if preference
            else "texts as they are",
        )
        yield "filter", held_out(config.held_out, "pairs by the hash of their first text")
        yield "filter", f"pairs with a member longer than a row: {config.long}"
        yield "order", order(job, shuffle=config.shuffle)
        yield (
            "pack",
            "one text in a row; a pair is two rows, " + ("chosen, rejected" if preference else "anchor, positive"),
        )
        try:
            files, known = find(config.path, key="text_pairs.path"), ""
            wanted = self._wanted(job)
            if (wanted.out / FILE).is_file():
                found = open_prepared(wanted.out, key="text_pairs.path").sides
                known = "; " + ", ".join(f"{one.count // 2:,} pairs for {side}" for side, one in found.items())
            yield "source", f"{counted(files)}{known}"
            yield "decode", "each record is a pair"
        except ConfigError as error:
            yield "source", str(error)

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from dataclasses import replace

        import torch

        from forge_train_kit.data.loader import example

        return replace(example(job, isolate=True), targets={"member": torch.arange(job.config.train.micro_batch) % 2})

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """Say how much is learned."""
        from forge_train_kit.data.learned import tell_learned

        if job.dist.main and self._sides is not None and self._epoch is not None:
            tell_learned("text_pairs", "pairs", self._sides, self._epoch, job, group=2)
        self._job = job

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        """Complete the tokenizer's files, which exports and `forge generate` read."""
        from forge_train_kit.data.chats import save_template

        if event.kind == "saving" and self.config.kind == "preference" and self._job is not None:
            save_template(self._job, self.config.template, self.config.template_options)

    @hookimpl
    def on_end(self, finished: Finished, job: Job) -> None:
        from forge_train_kit.data.chats import save_question

        if finished.outcome == "done" and job.hooks.gives("head") == "token_logits":
            save_question(job, self)

    def _open(self, job: Job) -> Mapping[Side, Documents]:
        if self._sides is None:
            from forge_train_kit.data.prepare.cached import obtained

            self._sides = obtained(self._wanted(job), job, "text_pairs").sides
        return self._sides

    def _wanted(self, job: Job) -> Preparation:
        from forge_train_kit.data.prepare.cached import wanted_of

        config = self.config
        return wanted_of(
            job,
            config.path,
            config.cache,
            "text_pairs",
            held_out=config.held_out,
            pairs=config.kind,
            chat=config.kind == "preference",
            template=config.template,
            template_options=config.template_options,
            rename=config.rename,
            roles=config.roles,
            split_special_tokens=config.split_special_tokens,
        )

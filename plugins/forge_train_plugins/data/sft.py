"""Conversations as training data: supervised fine-tuning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import Batch, ConfigError, Ge, Lt, Problem, Volatile, hookimpl, section
from forge_train.contract.protocols import Loader
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.data.plugin import (
    DataPlugin,
    Prefetch,
    ahead,
    bucket_values,
    check_buckets,
    check_path,
    check_prefetch,
    check_weights,
)

if TYPE_CHECKING:
    import torch

    from forge_train import CheckpointEvent, Finished, Job, Model, Span, SpanName
    from forge_train.config import Config as RunConfig
    from forge_train_kit.data.documents import Documents
    from forge_train_kit.data.held_out import Side
    from forge_train_kit.data.items import Records
    from forge_train_kit.data.prepare import Preparation
    from forge_train_kit.data.rows import Pieces


class SFT(DataPlugin):
    """Conversations, rendered by the tokenizer's chat template; only what the assistant says is learned.

    Reads `{"messages": …}`, ShareGPT, `{"prompt", "completion"}` and Alpaca, from every file format there is. What is
    learned includes the token that ends the assistant's turn. Whole conversations are packed into rows. The run's copy
    of the tokenizer's files gets the template and the token that ends a turn, so that an export stops there.

    With a modality, such as `image`, messages may have items: as parts of their content, as OpenAI writes them, or
    beside the messages, with a placeholder for each, as in LLaVA's data. They stand where the template writes its
    placeholder.
    """

    api = (1, 0)
    requires = ("tokenizer",)

    @section
    class Config:
        path: str | tuple[str, ...] = ""
        """Files, folders, patterns or addresses with one conversation in each record."""
        items: str = ""
        """Folder of relative paths of items; see `multimodal.items`."""
        template: str = ""
        """The chat template: `chatml`, `llama3`, `plain`, a file, or the name of one of the tokenizer's; empty for its
        own."""
        template_options: Mapping[str, Any] = field(default_factory=dict)
        """Options of the template: `{ enable_thinking = false }`; the saved template has them as its defaults."""
        learn: Literal["assistant", "last", "all"] = "assistant"
        """Tokens to learn: every turn of the assistant, its last one, or all tokens but the assistant's messages with
        a weight of 0."""
        learn_pattern: str = ""
        """A regular expression: of these tokens, learn only what it matches, and the token that ends a turn if a match
        reaches the end. Each conversation must match. `(?s)<answer>.*` learns answers without what leads to them."""
        each_turn: bool = False
        """Make each turn of the assistant a row of its own, of which only that turn is learned: thoughts of earlier
        turns are then removed as the template removes them when the model is used."""
        split_special_tokens: bool = False
        """Keep special tokens that stand in messages, calls and tools as text; otherwise `<|im_end|>` in a user's
        message ends the turn."""
        rename: Mapping[str, str] = field(default_factory=dict)
        """The name to read, and the records' own: `{ prompt = "question", completion = "row.answer" }`; `role` and
        `content` rename the fields of messages."""
        roles: Mapping[str, str] = field(default_factory=dict)
        """The records' names of roles: `{ bot = "assistant" }`."""
        long: Literal["refuse", "drop", "left", "right"] = "refuse"
        """Treatment of a conversation longer than a row: it ends the run, is left out, or loses tokens on its left
        or right."""
        packing: Literal["best_fit", "pad", "buckets"] = "best_fit"
        """Several conversations in a row; one; or `buckets`: those of like length in micro-batches of at most
        `train.sequence` tokens, padding included."""
        held_out: Annotated[float, Ge(0), Lt(1)] = 0.02
        """Share of the conversations that is kept for evaluation."""
        shuffle: bool = True
        """Take the rows in another order in every epoch."""
        prefetch: Annotated[Prefetch, Volatile()] = Prefetch()
        """Reading ahead of the step, and what becomes of samples that can't be read."""
        cache: Annotated[str, Volatile()] = ""
        """Folder for tokens; empty for forge-train/sft in $XDG_CACHE_HOME or ~/.cache."""

    config: Config
    _sides: Mapping[Side, Any] | None = None
    _epoch: Pieces | None = None
    _model: Model | None = None
    _end: int | None = None
    """The token that ends a turn."""
    _begins = True

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        return bucket_values(config.packing)

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        yield from check_prefetch(self.config.prefetch, "sft", items=True)
        yield from check_buckets(self.config.packing, config)
        if self.config.each_turn and self.config.learn != "assistant":
            yield Problem("sft.learn", "has no effect with sft.each_turn: a row's last turn is learned.")
        try:
            re.compile(self.config.learn_pattern)
        except re.error as error:
            yield Problem("sft.learn_pattern", f"no regular expression: {error}.")
        yield from check_path(self.config.path, "sft.path", "your conversations, such as chats.jsonl")

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities | None:
        return KernelCapabilities(documents=True) if self.config.packing != "buckets" else None

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from forge_train_kit.data.stream import HELD_OUT_SEED, Ordered
        from forge_train_kit.data.tokens import laid_out

        documents, sequence = self._open(job)[split], job.config.train.sequence
        check_weights(documents, job, "sft.path")
        packing = self.config.packing
        pieces = self._pieces(documents, sequence)
        if split == "train":
            self._epoch = pieces
        rows = laid_out(documents, sequence, pieces, packing=packing, pad=hookspecs.tokenizer(job).end or 0)
        if not rows.count:
            which = (
                "training" if split == "train" else "evaluation: raise sft.held_out, or set train.evaluate_every = 0"
            )
            raise ConfigError(f"sft.path: {self.config.path} leaves no conversation for {which}.")
        seed = HELD_OUT_SEED if split == "validation" else job.seed if self.config.shuffle else None
        return self.loader(Ordered(rows, seed, key="sft", fixed=split == "validation"), job, split)

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.files import find
        from forge_train_kit.data.items import opened
        from forge_train_kit.data.manifest import FILE, open_prepared
        from forge_train_kit.data.stages import counted, held_out, order, packed, sides

        config, rows = self.config, None
        yield "render", f"chat template: {config.template or 'of the tokenizer'}; learned: {config.learn}"
        if config.learn_pattern:
            yield "render", f"of that, only what matches {config.learn_pattern!r}"
        if config.each_turn:
            yield "render", "each turn of the assistant is a document that ends with it, and alone is learned"
        yield "filter", held_out(config.held_out, "conversations by their hash")
        yield "filter", f"conversations longer than a row: {config.long}"
        yield "order", order(job, shuffle=config.shuffle)
        yield from ahead(config.prefetch, job)
        try:
            files = find(config.path, key="sft.path")
            wanted = self._wanted(job)
            known = ""
            if (wanted.out / FILE).is_file():
                found: Mapping[Side, Any] = opened(open_prepared(wanted.out, key="sft.path").sides, wanted.items)
                pieces = self._pieces(found["train"], job.config.train.sequence)
                known, rows = f"; {sides(found)}", len(pieces.row_ends)
            yield "source", f"{counted(files)}{known}"
            yield "decode", "each record is a conversation"
        except ConfigError as error:
            yield "source", str(error)
        yield "pack", packed(config.packing, job, isolate=True, rows=rows)

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from forge_train_kit.data.items import no_items
        from forge_train_kit.data.loader import example

        return example(job, isolate=self.config.packing != "buckets", items=no_items(job))

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """Say how much is learned."""
        from forge_train_kit.data.learned import tell_learned

        if job.dist.main and self._sides is not None and self._epoch is not None:
            tell_learned("sft", "turns" if self.config.each_turn else "conversations", self._sides, self._epoch, job)

        self._model = model

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        return self._beginning if span == "step" else None

    @contextmanager
    def _beginning(self) -> Iterator[None]:
        """Before the first step, when the weights are there: warn of an end of turns that can't be learned."""
        if self._begins and self._job is not None and self._model is not None and self._end is not None:
            from forge_train_kit.data.unlearned import warn_of_unlearned_stop

            way_out = f"-p new_rows -s 'new_rows.ids=[{self._end}]'"
            warn_of_unlearned_stop(self._model, self._job, "sft", self._end, way_out)
        self._begins = False
        yield

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        """Complete the tokenizer's files, which exports and `forge generate` read."""
        from forge_train_kit.data.chats import save_template

        self._begins = self._begins and event.kind != "loaded"
        if event.kind == "saving" and self._job is not None:
            save_template(self._job, self.config.template, self.config.template_options)

    @hookimpl
    def on_end(self, finished: Finished) -> None:
        from forge_train_kit.data.chats import save_question

        super().on_end(finished)
        if finished.outcome == "done" and self._job is not None:
            save_question(self._job, self)

    def _open(self, job: Job) -> Mapping[Side, Any]:
        if self._sides is None:
            from forge_train_kit.data.items import opened
            from forge_train_kit.data.prepare.cached import end_of_turns, obtained

            wanted = self._wanted(job)
            self._sides = opened(obtained(wanted, job, "sft").sides, wanted.items)
            self._end = end_of_turns(wanted, job)
        return self._sides

    def _pieces(self, documents: Documents | Records, sequence: int) -> Pieces:
        from forge_train_kit.data.fit import fitted
        from forge_train_kit.data.items import Records

        config = self.config
        if isinstance(documents, Records):
            return documents.fitted(sequence, long=config.long, packing=config.packing, key="sft")
        return fitted(documents, sequence, long=config.long, packing=config.packing, key="sft")

    def _wanted(self, job: Job) -> Preparation:
        from forge_train_kit.data.items import ItemFields
        from forge_train_kit.data.prepare.cached import wanted_of

        config = self.config
        return wanted_of(
            job,
            config.path,
            config.cache,
            "sft",
            held_out=config.held_out,
            chat=True,
            template=config.template,
            template_options=config.template_options,
            rename=config.rename,
            roles=config.roles,
            learn=config.learn,
            learn_pattern=config.learn_pattern,
            each_turn=config.each_turn,
            split_special_tokens=config.split_special_tokens,
            items=ItemFields.of(job, config.path, "sft", config.items, broken=config.prefetch.on_error),
        )

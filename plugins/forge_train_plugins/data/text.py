"""Text files as training data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from forge_train import Batch, ConfigError, Ge, Lt, Volatile, hookimpl, section
from forge_train.base.errors import Problem
from forge_train.contract.events import Evaluation, Finished, LogRecord
from forge_train.contract.protocols import Loader
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.data.plugin import DataPlugin, Prefetch, ahead, check_prefetch

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train.config import Config as RunConfig

    from ._text.corpus import Corpus, Recipe, Split


class Text(DataPlugin):
    """Text files, tokenised once and packed into sequences; by default Python's own library.

    The run's tokenizer makes the tokens; `text.tokenizer` is another name for `tokenizer.path`.
    `bits_per_byte` of an evaluation does not depend on the tokenizer; `trigram_bits_per_byte` is what counting byte
    trigrams of the training text gives on the same held-out text.
    """

    api = (1, 0)
    requires = ("tokenizer",)

    @section
    class Config:
        path: str | tuple[str, ...] = ""
        """Files, folders, glob patterns or addresses, of any format; empty for Python's standard library."""
        field: str = "text"
        """Field that holds the text in records of .jsonl, .parquet and the like."""
        held_out: Annotated[float, Ge(0), Lt(1)] = 0.02
        """Share of the documents that is kept for evaluation; of every document where there are few."""
        isolate: bool = True
        """Keep attention inside a document; otherwise the documents are one long text."""
        shuffle: bool = True
        """Take the sequences in another order in every epoch."""
        cache: Annotated[str, Volatile()] = ""
        """Folder for tokens; empty for forge-train/text in $XDG_CACHE_HOME or ~/.cache."""
        baseline: Annotated[bool, Volatile()] = True
        """Report at each evaluation what a byte trigram achieves on the held-out text."""
        prefetch: Annotated[Prefetch, Volatile()] = Prefetch()
        """Reading ahead of the step, and what becomes of samples that can't be read."""

    config: Config
    _corpus: Corpus | None = None
    _held_out: Split | None = None

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        yield from check_prefetch(self.config.prefetch, "text")
        from ._text.sources import find, is_plain

        records = False
        if not self.config.path:  # walking the standard library would only repeat what opening the corpus does
            if config.train.init_from:
                yield Problem(
                    "text.path",
                    "a run that starts from weights (train.init_from) needs a text of its own; set it to your files. "
                    "Python's library is the default only for a run that starts from nothing.",
                    data=True,
                )
        else:
            try:
                records = any(not is_plain(file) for file in find(self.config.path))
            except ConfigError as error:
                yield Problem("text.path", str(error).removeprefix("text.path: "), data=True)
                return
        if not records and self.config.field != "text":
            yield Problem("text.field", "has no effect: there is no file of records under text.path.", data=True)

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities | None:
        return KernelCapabilities(documents=True) if self.config.isolate else None

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from ._text.ordered import ordered

        corpus = self._open(job)
        stream = ordered(corpus, split, job, shuffle=self.config.shuffle, isolate=self.config.isolate)
        if split == "validation":
            self._job, self._held_out = job, corpus.validation
        return self.loader(stream, job, split)

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.stages import counted, held_out, order, packed

        from ._text.cache import folder
        from ._text.corpus import cached
        from ._text.sources import describe, find, is_plain

        rows = None
        try:
            files = find(self.config.path)
            plain = all(map(is_plain, files))
            found = cached(self._recipe, hookspecs.tokenizer(job), folder(self.config.cache))
            yield "source", f"{describe(self.config.path)}: {counted(files)}"
            yield "decode", "each file is a document" if plain else f"each record is a document: {self.config.field!r}"
            rows = len(found.train.tokens) // job.config.train.sequence if found else None
        except ConfigError as error:
            yield "source", str(error)
        yield "filter", held_out(self.config.held_out, "documents by their hash; the end of each where there are few")
        yield "pack", packed("split", job, isolate=self.config.isolate, rows=rows)
        yield "order", order(job, shuffle=self.config.shuffle)
        yield from ahead(self.config.prefetch, job)

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from forge_train_kit.data.loader import example

        return example(job, isolate=self.config.isolate)

    @hookimpl
    def on_log(self, record: LogRecord | Evaluation) -> None:
        part = self._held_out
        if part is None or not isinstance(record, Evaluation):
            return
        unpredicted = len(part.ends) if self.config.isolate else 1
        tokens_per_byte = (len(part.tokens) - unpredicted) / part.bytes
        record.add("bits_per_byte", record.loss / math.log(2) * tokens_per_byte)
        if self.config.baseline and self._trigram is not None:
            record.add("trigram_bits_per_byte", self._trigram)

    @hookimpl
    def on_end(self, finished: Finished) -> None:
        from ._text.prompt import opening

        super().on_end(finished)
        job = self._job
        if finished.outcome == "done" and self._held_out is not None and job is not None and job.dist.main:
            prompt = opening(self._held_out, hookspecs.tokenizer(job))
            file = job.run.artifact("prompt.txt")
            file.write_text(prompt, encoding="utf-8")
            job.record(file, self)

    @cached_property
    def _recipe(self) -> Recipe:
        from ._text.corpus import Recipe

        return Recipe(self.config.path, self.config.field, self.config.held_out)

    def _open(self, job: Job) -> Corpus:
        from ._text.cache import folder
        from ._text.corpus import open_corpus

        if self._corpus is None:
            self._corpus = open_corpus(self._recipe, hookspecs.tokenizer(job), folder(self.config.cache))
        return self._corpus

    @cached_property
    def _trigram(self) -> float | None:
        from ._text.corpus import trigram

        return trigram(self._recipe, self._corpus) if self._corpus else None

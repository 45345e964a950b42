"""Token shards as training data."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import Batch, ConfigError, FilePath, Ge, Lt, Problem, Volatile, hookimpl, section
from forge_train.contract.events import Evaluation, LogRecord
from forge_train.contract.protocols import Loader
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.data.plugin import (
    DataPlugin,
    Packing,
    Prefetch,
    ahead,
    bucket_values,
    check_buckets,
    check_prefetch,
    check_weights,
)

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train.config import Config as RunConfig
    from forge_train_kit.data.documents import Documents
    from forge_train_kit.data.held_out import Side


class Tokens(DataPlugin):
    """Token shards: a folder of `forge data prepare`, or files of Megatron, nanoGPT, llm.c or numpy.

    Shards are mapped and never read as a whole: a start takes the same short time at every size. A prepared folder
    brings its tokenizer along; with other files, `tokenizer.path` is the one that made them. `bits_per_byte` of an
    evaluation does not depend on the tokenizer; only a prepared folder knows its bytes.
    """

    api = (1, 0)
    requires = ("tokenizer",)

    @section
    class Config:
        path: Annotated[str, FilePath()] = ""
        """A folder that `forge data prepare` wrote, or files of tokens by name or pattern: `.bin` (with its `.idx`, a
        header, or `tokens.dtype`) or `.npy`."""
        dtype: Literal["", "uint16", "uint32", "int32", "int64"] = ""
        """Of a `.bin` file that does not say it."""
        held_out: Annotated[float, Ge(0), Lt(1)] = 0.01
        """Share of the documents, the last ones, that is kept for evaluation where the files hold nothing out."""
        packing: Packing = "split"
        """Rows: `split` all documents as one text every `train.sequence` tokens; `best_fit` several whole documents in
        a row; `pad` one document in a row; `buckets` documents of like length in micro-batches of at most
        `train.sequence` tokens, padding included. Only documents longer than `train.sequence` are cut by the others."""
        isolate: bool = True
        """Keep attention inside a document. Off, the documents are one long text: only with packing `split`."""
        shuffle: bool = True
        """Take the rows in another order in every epoch."""
        prefetch: Annotated[Prefetch, Volatile()] = Prefetch()
        """Reading ahead of the step, and what becomes of samples that can't be read."""

    config: Config
    _sides: Mapping[Side, Documents] | None = None

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        from forge_train_kit.data.tokens import tokenizer_of

        path = tokenizer_of(Path(config.path)) if config.path else ""
        return bucket_values(config.packing) | ({"tokenizer.path": path} if path else {})

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        yield from check_prefetch(self.config.prefetch, "tokens")
        if not self.config.path:
            yield Problem("tokens.path", "required: a folder that forge data prepare wrote, or a file of tokens.")
        elif not glob.glob(self.config.path) and not Path(self.config.path).with_suffix(".bin").exists():
            yield Problem("tokens.path", f"no such file or folder: {self.config.path}.", data=True)
        if self.config.packing != "split" and not self.config.isolate:
            yield Problem("tokens.isolate", f"packing {self.config.packing!r} keeps documents apart; leave it on.")
        yield from check_buckets(self.config.packing, config)

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities | None:
        return KernelCapabilities(documents=True) if self._apart else None

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from forge_train_kit.data.stream import HELD_OUT_SEED, Ordered
        from forge_train_kit.data.tokens import rows_of

        found = self._open(job)
        check_weights(found[split], job, "tokens.path")
        rows = rows_of(
            found[split],
            job.config.train.sequence,
            packing=self.config.packing,
            isolate=self.config.isolate,
            pad=hookspecs.tokenizer(job).end or 0,
        )
        if not rows.count:
            advice = "" if split == "train" else " Hold more out, or do not evaluate (train.evaluate_every = 0)."
            raise ConfigError(
                f"tokens.path: the {'training' if split == 'train' else 'held-out'} part of {self.config.path} has "
                f"{found[split].tokens:,} tokens, and one sequence takes {job.config.train.sequence:,}.{advice}"
            )
        seed = HELD_OUT_SEED if split == "validation" else job.seed if self.config.shuffle else None
        return self.loader(Ordered(rows, seed, key="tokens", fixed=split == "validation"), job, split)

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.stages import held_out, order, packed, sides
        from forge_train_kit.data.tokens import rows_of

        config = self.config
        yield "decode", f"token shards, mapped{f', of {config.dtype}' if config.dtype else ''}"
        yield "filter", held_out(config.held_out, "the last documents, where the files hold nothing out")
        yield "order", order(job, shuffle=config.shuffle)
        yield from ahead(config.prefetch, job)
        try:
            found = self._open(job)
        except ConfigError as error:
            yield "source", str(error)
            yield "pack", packed(config.packing, job, isolate=config.isolate)
            return
        yield "source", f"{config.path}: {sides(found)}"
        rows = rows_of(found["train"], job.config.train.sequence, packing=config.packing, isolate=config.isolate, pad=0)
        yield "pack", packed(config.packing, job, isolate=config.isolate, rows=rows.count)

    @hookimpl
    def on_log(self, record: LogRecord | Evaluation) -> None:
        if not isinstance(record, Evaluation):
            return
        from forge_train_kit.data.tokens import tokens_per_byte

        per_byte = tokens_per_byte(Path(self.config.path), isolate=self.config.isolate)
        if per_byte is not None:
            record.add("bits_per_byte", record.loss / math.log(2) * per_byte)

    @property
    def _apart(self) -> bool:
        """Return True if rows hold several documents, which the kernel keeps apart."""
        return self.config.isolate and self.config.packing != "buckets"

    def _open(self, job: Job) -> Mapping[Side, Documents]:
        if self._sides is None:
            from forge_train_kit.data.tokens import open_tokens

            path, config = Path(self.config.path), self.config
            self._sides = open_tokens(
                path, hookspecs.tokenizer(job), dtype=config.dtype, held_out=config.held_out, key="tokens"
            )
        return self._sides

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from forge_train_kit.data.loader import example

        return example(job, isolate=self._apart)

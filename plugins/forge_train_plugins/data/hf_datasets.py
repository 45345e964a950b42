"""Data sets of Hugging Face's library `datasets` as training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_train import Batch, ConfigError, Ge, Gt, Lt, Problem, Volatile, hookimpl, section
from forge_train.contract.protocols import Loader
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.data.plugin import DataPlugin, Prefetch, check_prefetch

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train.config import Config as RunConfig
    from forge_train_kit.data.documents import Documents
    from forge_train_kit.data.held_out import Side
    from forge_train_kit.data.streamed_loader import StreamedLoader

    from ._hf_datasets.opening import Wanted

_BUFFER = 1000
_HELD_OUT = 0.01


class HFDatasets(DataPlugin):
    """Data sets of the library `datasets`: of the hub, local files, or a folder that `save_to_disk` wrote.

    Tokenised once into a cache, and taken in any order. With `streaming`, records are read and tokenised while the run
    uses them, each by one data-parallel rank; such a run continues exactly, on as many data-parallel ranks as before.
    """

    api = (1, 0)
    requires = ("tokenizer",)
    needs: ClassVar[Mapping[str, str]] = {"datasets": "pip install 'forge-train[datasets]'"}

    @section
    class Config:
        path: str = ""
        """A name on the hub, a folder of files, one that `save_to_disk` wrote, or a builder as `json` or `parquet`."""
        name: str = ""
        """Configuration of a data set that has several."""
        data_files: str | tuple[str, ...] = ()
        """Files or patterns, for a builder."""
        split: str = "train"
        """Split to learn from. Of a builder or the hub, and without streaming, a slice too: `train[:10%]`."""
        validation: str = ""
        """The split for evaluation; empty to hold out part of `split`."""
        held_out: Annotated[float, Ge(0), Lt(1)] = _HELD_OUT
        """Share of the documents that is kept for evaluation, chosen by their content, where `validation` is empty."""
        field: str = "text"
        """Field of a record that holds its text."""
        streaming: bool = False
        """Read while training, and keep nothing on this machine."""
        shuffle: bool = True
        """Take the rows in another order in every epoch; when streaming, the documents of each `shuffle_buffer`."""
        shuffle_buffer: Annotated[int, Gt(0)] = _BUFFER
        """Documents that are shuffled together (streaming)."""
        isolate: bool = True
        """Keep attention inside a document; otherwise the documents are one long text."""
        prefetch: Annotated[Prefetch, Volatile()] = Prefetch()
        """Reading ahead of the step, and what becomes of samples that can't be read; when streaming, one thread."""
        cache: Annotated[str, Volatile()] = ""
        """Folder for tokens; empty for forge-train/hf_datasets in $XDG_CACHE_HOME or ~/.cache. The library's own is
        where $HF_HOME says."""

    config: Config
    _loader: StreamedLoader | None = None

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        yield from check_prefetch(self.config.prefetch, "hf_datasets")
        mine = self.config
        if not mine.path:
            yield Problem("hf_datasets.path", "required: a data set's name, its folder, or a builder such as json.")
        if mine.streaming and config.train.epochs:
            yield Problem(
                "train.epochs",
                "the size of a stream is unknown; set train.steps or train.tokens, or turn hf_datasets.streaming off.",
            )
        if mine.validation and mine.held_out != _HELD_OUT:
            yield Problem("hf_datasets.held_out", "has no effect: hf_datasets.validation names the split.")
        if not (mine.streaming and mine.shuffle) and mine.shuffle_buffer != _BUFFER:
            yield Problem("hf_datasets.shuffle_buffer", "has no effect without streaming and shuffle.")
        ahead = mine.prefetch
        if mine.streaming and (ahead.workers > 1 or ahead.kind != "threads"):
            yield Problem("hf_datasets.prefetch", "a stream is read in order: by one thread (workers = 1), or by none.")
        if mine.streaming and ahead.on_error == "skip":
            yield Problem(
                "hf_datasets.prefetch.on_error",
                "a stream can't be entered behind a record that fails, so none can stand in for it. Without streaming "
                "one can.",
            )

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities | None:
        return KernelCapabilities(documents=True) if self.config.isolate else None

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        if not (split == "train" or self.config.validation or self.config.held_out):
            raise ConfigError(
                "hf_datasets: nothing is held out for evaluation: name a split (hf_datasets.validation), set "
                "hf_datasets.held_out, or do not evaluate (train.evaluate_every = 0)."
            )
        if not job.dist.main:
            import datasets

            datasets.disable_progress_bars()
        if self.config.streaming:
            loader = self._stream(job, split)
            if split == "train":
                self._loader = loader
            return loader
        from forge_train_kit.data.rows import SplitRows
        from forge_train_kit.data.stream import HELD_OUT_SEED, Ordered

        documents = self._documents(job, split)
        rows = SplitRows(documents, job.config.train.sequence, isolate=self.config.isolate)
        if not rows.count:
            what, advice = "training", ""
            if split == "validation":
                what, advice = "held-out", " Hold more out, or do not evaluate (train.evaluate_every = 0)."
            raise ConfigError(
                f"hf_datasets.path: the {what} part of {self._wanted(split).label} has {documents.tokens:,} tokens, "
                f"and one sequence takes {job.config.train.sequence:,}.{advice}"
            )
        seed = HELD_OUT_SEED if split == "validation" else job.seed if self.config.shuffle else None
        return self.loader(Ordered(rows, seed, key="hf_datasets", fixed=split == "validation"), job, split)

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from forge_train_kit.data.loader import example

        return example(job, isolate=self.config.isolate)

    def state_dict(self) -> dict[str, Any]:
        """Return each rank's position in its stream; every rank has to call it."""
        return self._loader.gathered() if self._loader else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._loader and state:
            self._loader.scatter(state)

    @property
    def _held_out(self) -> float:
        return 0.0 if self.config.validation else self.config.held_out

    def _wanted(self, split: Side) -> Wanted:
        from ._hf_datasets.opening import Wanted

        files = self.config.data_files
        return Wanted(
            self.config.path,
            self.config.name,
            (files,) if isinstance(files, str) else files,
            self.config.validation if split == "validation" and self.config.validation else self.config.split,
        )

    def _stream(self, job: Job, split: Side) -> StreamedLoader:
        from forge_train_kit.data.streamed import StreamedRows
        from forge_train_kit.data.streamed_loader import StreamedLoader

        from ._hf_datasets.opening import Texts, open_stream

        wanted, dist = self._wanted(split), job.dist
        side = "train" if self.config.validation else split
        texts = Texts(
            open_stream(wanted, dist.data_rank, dist.data_ranks), self.config.field, side, self._held_out, wanted.label
        )
        rows = StreamedRows(
            texts,
            hookspecs.tokenizer(job),
            job.config.train.sequence,
            isolate=self.config.isolate,
            buffer=self.config.shuffle_buffer,
            seed=(job.seed, dist.data_rank) if split == "train" and self.config.shuffle else None,
            key="hf_datasets",
            once=split == "validation",
        )
        return StreamedLoader(rows, job, self.prefetch(split), key="hf_datasets")

    def _documents(self, job: Job, split: Side) -> Documents:
        from pathlib import Path

        from forge_train_kit import model_files
        from forge_train_kit.data.manifest import open_prepared
        from forge_train_kit.data.prepare import Preparation, Told, cache_folder, prepare, settled
        from forge_train_kit.data.prepare.cached import stale

        from ._hf_datasets.opening import files_of, open_table

        tokenizer, wanted = hookspecs.tokenizer(job), self._wanted(split)
        section, key = model_files.option(job.hooks) or ("", "")
        if not section:
            raise ConfigError("hf_datasets: the run's tokenizer is of a plugin that names no files of it.")
        files = files_of(open_table(wanted), wanted, self.config.field, cache_folder(self.config.cache, "hf_datasets"))
        preparation = settled(
            Preparation(
                files,
                Path(),
                tokenizer=getattr(job.config.sections[section], key),
                field=self.config.field,
                held_out=self._held_out,
            ),
            self.config.cache,
            "hf_datasets",
        )
        prepare(preparation, Told("hf_datasets"), key="hf_datasets.path", wait=True)
        prepared = open_prepared(preparation.out, key="hf_datasets.path")
        if prepared.manifest.tokenizer["digest"] != tokenizer.digest:
            raise ConfigError(f"hf_datasets: {stale(preparation)}")
        return prepared.sides["train" if self.config.validation else split]

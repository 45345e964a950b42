"""Several sources of tokens in proportion."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import (
    Batch,
    ConfigError,
    FilePath,
    Ge,
    Gt,
    Lt,
    Metric,
    Problem,
    Span,
    SpanName,
    Volatile,
    hookimpl,
    section,
)
from forge_train.contract.protocols import Loader
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.contract import Evaluator
from forge_train_kit.data.plugin import (
    DataPlugin,
    Packing,
    Prefetch,
    ahead,
    bucket_values,
    check_buckets,
    check_prefetch,
    check_weights,
    item_values,
)

if TYPE_CHECKING:
    from torch import Tensor

    from forge_train import Job, Model
    from forge_train.config import Config as RunConfig
    from forge_train_kit.data.held_out import Side
    from forge_train_kit.data.items import RowItems
    from forge_train_kit.data.rows import Rows

    from ._mixture.losses import Losses


@section
class Source:
    """One source of a mixture."""

    path: Annotated[str, FilePath()]
    """The tokens of the source; see `tokens.path`. Or its records, with `items`."""
    name: str = ""
    """Name in messages and metrics; empty for the last component of the path."""
    weight: Annotated[float, Ge(0)] = 1.0
    """Share of the sequences, relative to the weights of the other sources."""
    epochs: Annotated[float, Ge(0)] = 0.0
    """Largest number of passes over the source's rows; after that, the other sources replace it. 0 for no limit."""
    dtype: Literal["", "uint16", "uint32", "int32", "int64"] = ""
    """See `tokens.dtype`."""
    items: bool = False
    """The path names records of texts and items, as `multimodal` reads them, instead of tokens."""
    long: Literal["refuse", "drop", "left", "right"] = "refuse"
    """Treatment of a record with items longer than a row; see `multimodal.long`."""


@section
class Phase:
    """A later part of the run, in which the sources have other weights."""

    begin: Annotated[float, Gt(0)]
    """First step of the phase; below 1, a share of the run."""
    weights: tuple[Annotated[float, Ge(0)], ...]
    """Weights of the sources, in the order of `sources`."""

    def first_step(self, run: RunConfig) -> int:
        """Return the step with which it begins."""
        return round(self.begin * run.train.total_steps) if self.begin < 1 else int(self.begin)


class Mixture(DataPlugin):
    """Several sources of tokens in proportion: exact over any stretch of the run, on any number of ranks.

    Each sequence comes from one source, and each source is read in the same way as by `tokens`. If a run resumes with
    other weights or an additional source, each source continues where it stopped. Every evaluation reports the loss of
    each source. In each logged step, `loss.NAME` and `tokens.NAME` cover training since the previous logged step.
    """

    api = (1, 0)
    requires = ("tokenizer",)
    facts = {"check.example": ()}

    @section
    class Config:
        sources: tuple[Source, ...] = ()
        """The sources: `[{ path = "web", weight = 3 }, { path = "code" }]`."""
        temperature: Annotated[float, Gt(0)] = 1.0
        """Each weight is raised to the power 1 / temperature; a temperature above 1 makes the weights more equal."""
        phases: tuple[Phase, ...] = ()
        """Other weights later in the run: `[{ begin = 0.9, weights = [1, 4] }]`."""
        held_out: Annotated[float, Ge(0), Lt(1)] = 0.01
        """Share of each source kept for evaluation; see `tokens.held_out`."""
        packing: Packing = "split"
        """See `tokens.packing`."""
        isolate: bool = True
        """See `tokens.isolate`."""
        shuffle: bool = True
        """Use a different order of each source's rows in every epoch."""
        prefetch: Annotated[Prefetch, Volatile()] = Prefetch()
        """Reading ahead of the step, and handling of samples that can't be read."""
        cache: Annotated[str, Volatile()] = ""
        """Folder for cached tokens of records with items; empty means forge-train/mixture in $XDG_CACHE_HOME or
        ~/.cache."""

    config: Config
    _opened: dict[str, Mapping[Side, Any]] | None = None
    _losses: Losses | None = None

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        from forge_train_kit.data.tokens import tokenizer_of

        paths = [tokenizer_of(Path(source.path)) for source in config.sources]
        tokenizer = next(({"tokenizer.path": path} for path in paths if path), {})
        items = item_values("mixture") if any(source.items for source in config.sources) else {}
        return {**bucket_values(config.packing), **tokenizer, **items}

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        from ._mixture.sources import check_items

        items = any(source.items for source in self.config.sources)
        yield from check_prefetch(self.config.prefetch, "mixture", items=items)
        yield from check_items(self.config)
        if config.train.epochs:
            yield Problem(
                "train.epochs",
                "a mixture has no epochs, because its sources are drawn by weight; set train.steps or train.tokens.",
            )
        sources, names = self.config.sources, self._names()
        if not sources:
            yield Problem(
                "mixture.sources", 'required: [{ path = "web", weight = 3 }, { path = "code" }], for example.'
            )
            return
        for at, source in enumerate(sources):
            if not glob.glob(source.path) and not Path(source.path).with_suffix(".bin").exists():
                yield Problem("mixture.sources", f"item {at}: no such file or folder: {source.path}.", data=True)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield Problem("mixture.sources", f"two sources are named {twice[0]!r}: give one a `name` of its own.")
        if not any(source.weight for source in sources):
            yield Problem("mixture.sources", "all weights are 0: nothing would be read.")
        last = 0
        for at, phase in enumerate(self.config.phases):
            here = phase.first_step(config)
            if len(phase.weights) != len(sources):
                yield Problem(
                    "mixture.phases",
                    f"item {at} has {len(phase.weights)} weights, and there are {len(sources)} sources.",
                )
            elif not any(phase.weights):
                yield Problem("mixture.phases", f"item {at}: all weights are 0: nothing would be read.")
            if here <= last or here >= config.train.total_steps:
                yield Problem(
                    "mixture.phases",
                    f"item {at} begins at step {here}; phases begin one after the other, between step 1 and "
                    f"{config.train.total_steps - 1}.",
                )
            last = here
        if self.config.packing != "split" and not self.config.isolate:
            yield Problem("mixture.isolate", f"packing {self.config.packing!r} keeps documents apart; leave it on.")
        yield from check_buckets(self.config.packing, config)

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities | None:
        return KernelCapabilities(documents=True) if self._apart else None

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from forge_train_kit.data.mixed import Mixture as Mixed
        from forge_train_kit.data.mixed import Part
        from forge_train_kit.data.proportions import Recipe
        from forge_train_kit.data.stream import HELD_OUT_SEED, Ordered

        from ._mixture.recipe import run_recipe

        rows = {name: self._rows(name, job, split) for name in self._names()}
        rows = {name: found for name, found in rows.items() if split == "train" or found.count}
        if empty := next((name for name, found in rows.items() if not found.count), None if rows else "every source"):
            raise ConfigError(
                f"mixture.sources: the {'training' if split == 'train' else 'held-out'} part of {empty} has less than "
                f"one sequence of {job.config.train.sequence:,} tokens (train.sequence)."
            )
        held_out = split == "validation"
        seed = HELD_OUT_SEED if held_out else job.seed if self.config.shuffle else None
        parts = [Part(name, Ordered(one, seed, key="mixture", fixed=held_out)) for name, one in rows.items()]
        if held_out:
            once = {name: found.count for name, found in rows.items()}
            recipe = Recipe([(0, dict.fromkeys(rows, 1.0))], HELD_OUT_SEED, once)
        else:
            recipe = run_recipe(self.config, self._names(), job, rows)
        return self.loader(Mixed(parts, recipe, key="mixture", no_items=self._no_items(job)), job, split)

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.proportions import tempered
        from forge_train_kit.data.stages import held_out, order, packed, passes, sequences, sides

        config, names = self.config, self._names()
        share = tempered({n: s.weight for n, s in zip(names, config.sources, strict=True)}, config.temperature)
        whole, needed = sum(share.values()), sequences(job)
        yield "decode", "token shards, mapped"
        yield "filter", held_out(config.held_out, "the last documents of each source that holds nothing out")
        for phase in config.phases:
            yield "order", f"from step {phase.first_step(job.config):,} on: weights {list(phase.weights)}"
        yield "order", order(job, shuffle=config.shuffle)
        yield from ahead(config.prefetch, job)
        yield "pack", packed(config.packing, job, isolate=config.isolate)
        for name in names:
            part = share[name] / whole
            try:
                count = self._rows(name, job, "train").count
            except ConfigError as error:
                yield "source", f"{name}, {part:.1%} of the sequences: {error}"
                continue
            epochs = "" if config.phases or not count else f"; {passes(count, needed * part)}"
            yield "source", f"{name}, {part:.1%} of the sequences: {sides(self._open(job)[name])}{epochs}"

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        import torch

        from forge_train_kit.data.loader import SOURCE, example

        source = torch.zeros(job.config.train.micro_batch, dtype=torch.int64)
        return replace(example(job, isolate=self._apart, items=self._no_items(job)), targets={SOURCE: source})

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        """Loss and tokens of each source in training, since the last logged step."""
        from ._mixture.losses import Losses

        self._losses = Losses(self._names())
        return {**(super().metrics(model, job) or {}), "loss": self._losses.loss, "tokens": self._losses.tokens}

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        from forge_train_kit.losses import losses_told_to

        return partial(losses_told_to, self._observe) if span == "forward_backward" else None

    def _observe(self, batch: Batch, losses: Tensor) -> None:
        if self._losses is not None:
            self._losses(batch, losses)

    @hookimpl
    def evaluators(self, job: Job) -> Iterable[Evaluator]:
        """The task's loss on the held-out text of each source."""
        from ._mixture.losses import held_out_loss

        if not job.config.train.evaluate_every:
            return
        for name in self._names():
            if (rows := self._rows(name, job, "validation")).count:
                yield held_out_loss(name, rows, job)

    @property
    def _apart(self) -> bool:
        return self.config.isolate and self.config.packing != "buckets"

    def _names(self) -> list[str]:
        return [source.name or Path(source.path).name for source in self.config.sources]

    def _no_items(self, job: Job) -> Mapping[str, RowItems] | None:
        """A row without items, if some source has items."""
        from forge_train_kit.data.items import no_items

        return no_items(job) if any(source.items for source in self.config.sources) else None

    def _rows(self, name: str, job: Job, split: Side) -> Rows:
        from ._mixture.sources import source_rows

        documents = self._open(job)[name][split]
        check_weights(documents, job, f"mixture.sources: {name!r}")
        return source_rows(documents, self._names().index(name), self.config, job)

    def _open(self, job: Job) -> dict[str, Mapping[Side, Any]]:
        if self._opened is None:
            from ._mixture.sources import open_source

            self._opened = {name: open_source(at, self.config, job) for at, name in enumerate(self._names())}
        return self._opened

"""Several sources of tokens in proportion."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import (
    Batch,
    ConfigError,
    Evaluator,
    FilePath,
    Ge,
    Gt,
    KernelCapabilities,
    Lt,
    Plugin,
    Problem,
    hookimpl,
    section,
)
from forge_train.contract.protocols import Loader

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train.config import Config as RunConfig
    from forge_train_data.documents import Documents
    from forge_train_data.held_out import Side
    from forge_train_data.rows import Rows


@section
class Source:
    """One source of a mixture."""

    path: Annotated[str, FilePath()]
    """As `tokens.path`."""
    name: str = ""
    """In messages and metrics; without one, the path's last part."""
    weight: Annotated[float, Ge(0)] = 1.0
    """Its share of the sequences, beside those of the others."""
    epochs: Annotated[float, Ge(0)] = 0.0
    """How often its rows are used at most; then the others fill its place. 0 for no limit."""
    dtype: Literal["", "uint16", "uint32", "int32", "int64"] = ""
    """As `tokens.dtype`."""


@section
class Phase:
    """From when on the sources have other weights."""

    begin: Annotated[float, Gt(0)]
    """The step; below 1, the share of the run."""
    weights: tuple[Annotated[float, Ge(0)], ...]
    """Of the sources, in their order."""


class Mixture(Plugin):
    """Several sources of tokens in proportion: exact over any stretch of the run, on any number of ranks.

    Each sequence comes from one source, and each source is read as `tokens` reads it. A run that goes on with other
    weights, or with a source more, takes up each source where it was. Every evaluation tells each source's loss apart.
    """

    api = (1, 0)
    requires = ("tokenizer",)
    example = ()

    @section
    class Config:
        sources: tuple[Source, ...] = ()
        """The sources: `[{ path = "web", weight = 3 }, { path = "code" }]`."""
        temperature: Annotated[float, Gt(0)] = 1.0
        """Weights count to the power of 1 / temperature: above 1 they become more alike."""
        phases: tuple[Phase, ...] = ()
        """Other weights later in the run: `[{ begin = 0.9, weights = [1, 4] }]`."""
        held_out: Annotated[float, Ge(0), Lt(1)] = 0.01
        """As `tokens.held_out`, of each source."""
        packing: Literal["split", "best_fit", "pad"] = "split"
        """As `tokens.packing`."""
        isolate: bool = True
        """As `tokens.isolate`."""
        shuffle: bool = True
        """Take each source's rows in another order in every epoch."""

    config: Config
    _opened: dict[str, Mapping[Side, Documents]] | None = None

    @classmethod
    def brings(cls, config: Any) -> Mapping[str, Any]:
        from forge_train_data.tokens import tokenizer_of

        paths = [tokenizer_of(Path(source.path)) for source in config.sources]
        return next(({"tokenizer.path": path} for path in paths if path), {})

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
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
            here = self._step(phase, config)
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

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities | None:
        return KernelCapabilities(documents=True) if self.config.isolate else None

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from forge_train_data.loader import StreamLoader
        from forge_train_data.mixed import Mixture as Mixed
        from forge_train_data.mixed import Part
        from forge_train_data.proportions import Phases
        from forge_train_data.stream import HELD_OUT_SEED, Ordered

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
        phases = [(0, dict.fromkeys(rows, 1.0))] if held_out else self._phases(job, rows)
        proportions = Phases(phases, HELD_OUT_SEED if held_out else job.seed)
        return StreamLoader(Mixed(parts, proportions, key="mixture"), job)

    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_data.proportions import tempered
        from forge_train_data.stages import held_out, order, packed, passes, sequences, sides

        config, names = self.config, self._names()
        share = tempered({n: s.weight for n, s in zip(names, config.sources, strict=True)}, config.temperature)
        whole, needed = sum(share.values()), sequences(job)
        yield "decode", "token shards, mapped"
        yield "filter", held_out(config.held_out, "the last documents of each source that holds nothing out")
        for phase in config.phases:
            yield "order", f"from step {self._step(phase, job.config):,} on: weights {list(phase.weights)}"
        yield "order", order(job, shuffle=config.shuffle)
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
        from forge_train_data.loader import example

        return example(job, isolate=self.config.isolate)

    @hookimpl
    def evaluators(self, job: Job) -> Iterable[Evaluator]:
        """The loss on each source's held-out text: as the task has it."""
        from forge_train import metrics
        from forge_train.nn import full_tensor
        from forge_train_data.loader import StreamLoader
        from forge_train_data.stream import HELD_OUT_SEED, Ordered

        if not job.config.train.evaluate_every:
            return
        task = job.hooks.task()
        for name in self._names():
            rows, mean = self._rows(name, job, "validation"), metrics.Mean()
            if not rows.count:
                continue

            def measure(part: Any, hidden: Any, batch: Batch, mean: Any = mean) -> None:
                weight = task.weight(batch)
                loss = full_tensor(task.loss(part, hidden, batch).detach())
                mean.update(loss / max(weight, 1), weights=loss.new_tensor(weight))

            def data(rows: Rows = rows) -> Loader:
                return StreamLoader(Ordered(rows, HELD_OUT_SEED, key="mixture", fixed=True), job)

            yield Evaluator(name, data, measure, {"loss": mean})

    def _names(self) -> list[str]:
        return [source.name or Path(source.path).name for source in self.config.sources]

    def _step(self, phase: Phase, config: RunConfig) -> int:
        return round(phase.begin * config.train.total_steps) if phase.begin < 1 else int(phase.begin)

    def _phases(self, job: Job, rows: Mapping[str, Rows]) -> list[tuple[int, Mapping[str, float]]]:
        """Weights by the index of the first sequence that they are for.

        Raises:
            ConfigError: every source was used up to its `epochs` before the run ends.
        """
        from forge_train_data.proportions import capped, tempered

        train, names, config = job.config.train, self._names(), self.config
        first = {0: tuple(source.weight for source in config.sources)}
        for phase in config.phases:
            first[sum(map(train.batch_at, range(self._step(phase, job.config))))] = phase.weights
        phases = [
            (at, tempered(dict(zip(names, weights, strict=True)), config.temperature)) for at, weights in first.items()
        ]
        caps = {
            name: int(rows[name].count * source.epochs)
            for name, source in zip(names, config.sources, strict=True)
            if source.epochs
        }
        found, end = capped(phases, caps, job.seed)
        needed = sum(map(train.batch_at, range(train.total_steps)))
        if end is not None and end < needed:
            raise ConfigError(
                f"mixture.sources: all are used up to their `epochs` after {end:,} sequences, and the run takes "
                f"{needed:,}. Raise `epochs`, add a source without, or shorten the run."
            )
        return found

    def _rows(self, name: str, job: Job, split: Side) -> Rows:
        from forge_train_data.tokens import rows_of

        return rows_of(
            self._open(job)[name][split],
            job.config.train.sequence,
            packing=self.config.packing,
            isolate=self.config.isolate,
            pad=job.hooks.tokenizer().end or 0,
        )

    def _open(self, job: Job) -> dict[str, Mapping[Side, Documents]]:
        if self._opened is None:
            from forge_train_data.tokens import open_tokens

            tokenizer, share = job.hooks.tokenizer(), self.config.held_out
            self._opened = {
                name: open_tokens(Path(source.path), tokenizer, dtype=source.dtype, held_out=share, key="mixture")
                for name, source in zip(self._names(), self.config.sources, strict=True)
            }
        return self._opened

"""Sources of a mixture: tokens, or records with items, such as images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError, Problem
from forge_train_kit import hookspecs
from forge_train_kit.data.items import ItemFields, Records, opened
from forge_train_kit.data.prepare.cached import obtained, wanted_of
from forge_train_kit.data.tokens import laid_out, open_tokens, rows_of

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.data.held_out import Side
    from forge_train_kit.data.rows import Rows

    from ..mixture import Mixture


def check_items(config: Mixture.Config) -> Iterator[Problem]:
    """Check the options of sources with items: for `check_config`."""
    for at, source in enumerate(config.sources):
        if source.items and config.packing in ("split", "buckets"):
            yield Problem(
                "mixture.packing", f"{config.packing!r} cuts items, which source {at} has; choose best_fit or pad."
            )
        if source.items and source.dtype:
            yield Problem("mixture.sources", f"item {at}: dtype has no effect on records; remove it.")
        if source.long != "refuse" and not source.items:
            yield Problem("mixture.sources", f"item {at}: long has no effect without items; remove it.")


def open_source(at: int, config: Mixture.Config, job: Job) -> Mapping[Side, Any]:
    """Both sides of a source; records are prepared if they are not yet.

    Raises:
        ConfigError: as of preparations and of tokens; no plugin gives a modality.
    """
    source, key, share = config.sources[at], f"mixture.sources[{at}]", config.held_out
    if not source.items:
        tokenizer = hookspecs.tokenizer(job)
        return open_tokens(Path(source.path), tokenizer, dtype=source.dtype, held_out=share, key=key)
    fields = ItemFields.of(job, source.path, key, broken=config.prefetch.on_error)
    if fields is None:
        raise ConfigError(f"{key}.items: no enabled plugin gives a modality, so records can have no items.")
    wanted = wanted_of(job, source.path, config.cache, "mixture", key=key, held_out=share, items=fields)
    return opened(obtained(wanted, job, "mixture").sides, fields)


def source_rows(documents: Any, at: int, config: Mixture.Config, job: Job) -> Rows:
    """The rows of one side of a source."""
    sequence, pad, packing = job.config.train.sequence, hookspecs.tokenizer(job).end or 0, config.packing
    if not isinstance(documents, Records):
        return rows_of(documents, sequence, packing=packing, isolate=config.isolate, pad=pad)
    pieces = documents.fitted(sequence, long=config.sources[at].long, packing=packing, key=f"mixture.sources[{at}]")
    return laid_out(documents, sequence, pieces, packing=packing, pad=pad)

"""Micro-batches of a rehearsal, as the data's plugin describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from forge_train.contract.batch import Batch
from forge_train.plugin.job import Job
from forge_train_kit.enabled_modalities import enabled_modalities
from forge_train_kit.modalities import Grid, extras_of

from ..hookspecs import example_batch


@dataclass(frozen=True)
class RowItems:
    """Items of a modality that each row is taken to have."""

    count: int
    grid: Grid
    """Patches of one: along time, height and width."""
    positions: int
    """Of one in the sequence."""


@dataclass(frozen=True)
class Example:
    """A micro-batch of zeros."""

    batch: Batch
    items: Mapping[str, RowItems] = field(default_factory=dict)
    """Modality → its items."""
    notes: tuple[str, ...] = ()
    """Reasons why batches of a run may differ."""


def example_of(job: Job) -> Example:
    """A micro-batch such as the run's data gives. Rows with room for items of a modality are filled with those that the
    modality gives as an example; where an item takes one position whatever its size, each row has one."""
    hooks, train = job.hooks, job.config.train
    batch = dict(example_batch(job)).get(hooks.provider("build_data") or "")
    if batch is not None:
        return _with_items(batch, job)
    ids = torch.zeros(train.micro_batch, train.sequence, dtype=torch.int64)
    note = (
        f"batches are taken for token ids and labels: plugin {hooks.provider('build_data')!r} says nothing of them "
        "(example_batch)"
    )
    return Example(Batch(ids, ids), notes=(note,))


def _with_items(batch: Batch, job: Job) -> Example:
    extras, found, notes = dict(batch.extras), dict[str, RowItems](), list[str]()
    read = {name: one for name, one in enabled_modalities(job).items() if extras_of(name)[1] in extras}
    alone, (rows, sequence) = job.hooks.gives("fusion") == "token", batch.inputs.shape
    at = 0
    for name, modality in read.items():
        values, grids, places = extras_of(name)
        make = getattr(modality, "example", None)
        if extras[grids].any():
            continue
        if make is None:
            notes.append(f"counted without items of modality {name!r}, which gives no example of one")
            continue
        item = make()
        positions = 1 if alone else modality.positions(item.grid)
        count = 1 if alone else sequence // len(read) // positions
        if not count:
            notes.append(f"counted without items of modality {name!r}, one of which takes {positions:,} positions")
            continue
        found[name] = RowItems(count, item.grid, positions)
        extras[values] = torch.from_numpy(item.values).repeat(rows, count, 1)
        extras[grids] = torch.tensor(item.grid).repeat(rows, count, 1)
        extras[places] = extras[places].clone()
        extras[places][:, at : at + count * positions] = torch.arange(count * positions)
        at += count * positions
    return Example(replace(batch, extras=extras), found, tuple(notes))

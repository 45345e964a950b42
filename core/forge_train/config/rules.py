"""Rules between core's own values, and the layout of the processes that follows from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ..base.errors import Problem
from ..mesh.layout import Layout, LayoutError
from . import LENGTHS, Config


def check(config: Config, world: int) -> Iterator[Problem]:
    """Mistakes in core's sections that only several values together show."""
    train = config.train
    written = config.as_written.get("train", {})
    if len(given := [key for key in LENGTHS if written.get(key, getattr(train, key))]) != 1:
        found = " and ".join(given) or "none of them"
        yield Problem("train.steps", f"say how long to train, in either steps, tokens or epochs; found {found}.")
    try:
        layout = Layout.of(config.parallel, world)
    except LayoutError as error:
        yield error.problem
        return
    per_pass = (train.micro_batch or 1) * layout.dp
    for size in train.batches:
        if size % per_pass:
            yield Problem(
                "train.batch_warmup" if size != train.global_batch else "train.global_batch",
                f"{size} is not a multiple of micro_batch × data-parallel ranks "
                f"= {train.micro_batch or 1} × {layout.dp} = {per_pass}.",
            )
    if not all(size < following for size, following in pairwise(train.batches)):
        yield Problem(
            "train.batch_warmup",
            f"expected batches that grow up to train.global_batch, found {', '.join(map(str, train.batches))}.",
        )
    if (warmup := sum(phase.steps for phase in train.batch_warmup)) and warmup >= train.total_steps > 0:
        yield Problem(
            "train.batch_warmup", f"{warmup:,} steps leave none of the run's {train.total_steps:,} for the whole batch."
        )


def fill_in(config: Config, world: int) -> Config:
    """A checked configuration with the values that follow from others."""
    if config.train.micro_batch:
        return config
    return filled(config, micro_batch=math.gcd(*config.train.batches) // Layout.of(config.parallel, world).dp)


def filled(config: Config, **values: Any) -> Config:
    """A configuration with values of [train] that it leaves open."""
    written = {**config.as_written.get("train", {}), **dict.fromkeys(values, 0)}
    train = dataclasses.replace(config.train, **values)
    return dataclasses.replace(config, train=train, as_written={**config.as_written, "train": written})

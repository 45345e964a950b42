"""Rules between core's own values, and the layout of the processes that follows from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ..base.errors import Problem, nearest
from ..base.names import canonical
from ..mesh.layout import Layout, LayoutError
from . import LENGTHS, Config

LONGEST_NAME = 200
"""Bytes of a run's name. File systems allow 255, and `--resume never` adds a number."""


def check(config: Config, world: int) -> Iterator[Problem]:
    """Mistakes in core's sections that only several values together show."""
    train = config.train
    if problem := _name_problem(config.run.name):
        yield Problem("run.name", problem)
    written = config.as_written.get("train", {})
    if len(given := [key for key in LENGTHS if written.get(key, getattr(train, key))]) != 1:
        found = " and ".join(given) or "none of them"
        yield Problem("train.steps", f"say how long to train, in either steps, tokens or epochs; found {found}.")
    sections, keys = {*config.everything()}, [*config.values()]
    for name in config.checkpoint.allow_changes:
        section, dot, _ = canonical(name).partition(".")
        if dot and section in sections and canonical(name) not in keys:
            yield Problem("checkpoint.allow_changes", f"there is no key {name!r}.{nearest(canonical(name), keys)}")
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


def _name_problem(name: str) -> str:
    """Why a run can't have this name; empty if it can. An empty name is none."""
    if name in (".", "..") or "/" in name or "\\" in name:
        return f"expected the name of a folder, found the path {name!r}; its place is --run-dir."
    if name.startswith("."):
        return f"expected a name that does not begin with a dot, found {name!r}: its folder would be hidden."
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        return f"expected a name without quotation marks around it, found {name}; write --set run.name={name[1:-1]}."
    if name != name.strip() or not name.isprintable():
        return f"expected printable characters, and no spaces at either end, found {name!r}."
    if (size := len(name.encode())) > LONGEST_NAME:
        return f"expected at most {LONGEST_NAME} bytes, found {size}: {name[:40]!r}…"
    return ""


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

"""Rehearsals: what `forge plan` says of a configuration, reduced to the numbers that a forecast of its time needs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from published import Row

from forge_train.base.errors import ForgeError
from forge_train.base.strict_json import dumps
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.planning import plan

FILE = Path(__file__).parent / "published" / "planned.json"
"""Numbers of plans by the key of their rows."""


@dataclass(frozen=True)
class Planned:
    """Numbers of a plan. Times are in seconds of a step of the busiest rank, by the data sheets."""

    products: float
    """At the peak."""
    narrow: float
    """Share of them in products of layers, which 8 bits make faster."""
    operands: float
    """To read and write what products multiply, once for each of them."""
    attention: float
    """At the peak."""
    memory: float
    """In products and the optimizer that wait for memory."""
    between: float
    """In kernels between them, where each reads and writes for itself."""
    traffic: tuple[tuple[str, str, int, int, int, float], ...]
    """Kind, axis, ranks, ranks on a node, calls and bytes of collectives and messages."""
    stretch: float
    """By what a pipeline makes a step longer."""
    peak: int
    """Bytes."""
    flops_per_token: float
    error: str = ""


def rehearse(request: Request, *, world: int, nodes: int, device: str) -> Planned:
    """Plan a configuration on a device or on the cluster of a file.

    Raises:
        ForgeError: if it is refused.
    """
    setup = resolve(request, world=world, data=False, measured=False)
    made = plan(setup, world=world, nodes=nodes, device=device)
    if made.roofline is None or made.memory.peak is None:
        return replace(EMPTY, error="; ".join(made.memory.notes) or "nothing was rehearsed")
    roof, flops, decoder = made.roofline, made.flops_per_token or 0.0, setup.config.sections["decoder"]
    attention = 6.0 * decoder.heads * (decoder.head_dim or decoder.dim // decoder.heads) * decoder.layers
    attention *= setup.config.train.sequence
    narrow = 1 - 6.0 * decoder.dim * decoder.vocabulary / (flops - attention)
    traffic = tuple((one.kind, one.axis, one.ranks, one.per_node, one.count, one.bytes) for one in made.communication)
    return Planned(
        roof.compute - roof.attention, max(narrow, 0.0), roof.operands, roof.attention, roof.memory, roof.fusible,
        traffic, made.pipeline.timeline.stretch if made.pipeline else 1.0, made.memory.peak, flops,
    )  # fmt: skip


def planned(row: Row) -> Planned:
    """Plan a published row. One that is refused has the reason in `error`."""
    logging.disable(logging.WARNING)
    try:
        return rehearse(row.request, world=row.devices, nodes=row.devices // row.node, device=row.device)
    except ForgeError as error:
        return replace(EMPTY, error=str(error).split("\n")[0])


def everything(rows: Sequence[Row], processes: int, file: Path = FILE) -> dict[str, Planned]:
    """Plan all rows that can be, those once that differ in their number of micro-batches alone; name → numbers.

    Args:
        rows: published ones.
        processes: that plan at once.
        file: where numbers are kept, so that a second call plans only what is new.
    """
    known = kept(file)
    alike = {_without_batch(row) for row in rows if not row.missing and row.key in known}
    wanted = {_without_batch(row): row for row in rows[::-1] if not row.missing}
    wanted = {key: row for key, row in wanted.items() if key not in alike}
    with ProcessPoolExecutor(processes) as pool:
        for done in as_completed({pool.submit(_keyed, row) for row in wanted.values()}):
            key, numbers = done.result()
            known[key] = numbers
            file.write_text(dumps({one: asdict(two) for one, two in sorted(known.items())}, indent=1), encoding="utf-8")
    return of_rows(rows, known)


def of_rows(rows: Sequence[Row], known: Mapping[str, Planned]) -> dict[str, Planned]:
    """Numbers of each row; name → numbers. A row that differs from a planned one in its number of micro-batches alone
    has those of that one, in proportion."""
    found, alike = {}, {_without_batch(row): row for row in rows if not row.missing and row.key in known}
    for row in (row for row in rows if not row.missing):
        if row.key in known:
            found[row.name] = known[row.key]
        elif other := alike.get(_without_batch(row)):
            found[row.name] = in_proportion(known[other.key], row.global_batch / other.global_batch)
    return found


def in_proportion(one: Planned, times: float) -> Planned:
    """A plan with so many times as many micro-batches: gradients are reduced once, and a pipeline waits as long."""
    scaled = {name: times * getattr(one, name) for name in PER_BATCH}
    return replace(
        one, **scaled, traffic=tuple(_more(*row, times) for row in one.traffic), stretch=1 + (one.stretch - 1) / times
    )


def _more(kind: str, axis: str, ranks: int, near: int, count: int, size: float, times: float) -> tuple[Any, ...]:
    times = 1.0 if is_data(kind, axis) else times
    return kind, axis, ranks, near, round(count * times), size * times


def is_data(kind: str, axis: str) -> bool:
    """Return True for collectives of data parallelism, which may hide behind compute."""
    return axis.startswith("dp_") and kind != "all_to_all"


def _without_batch(row: Row) -> str:
    return row.key.replace(f"train.global_batch={row.global_batch // row.flushes} ", "")


def kept(file: Path = FILE) -> dict[str, Planned]:
    """Numbers that were kept; key of a row → numbers."""
    if not file.exists():
        return {}
    known = json.loads(file.read_text("utf-8"))
    return {key: Planned(**{**one, "traffic": tuple(map(tuple, one["traffic"]))}) for key, one in known.items()}


def _keyed(row: Row) -> tuple[str, Planned]:
    return row.key, planned(row)


PER_BATCH = ("products", "operands", "attention", "memory", "between")
EMPTY = Planned(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (), 1.0, 0, 0.0)

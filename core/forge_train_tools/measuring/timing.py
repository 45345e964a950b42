"""Times of collectives, matrix products and memory on all ranks at once, as training has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Device, Layout
from forge_train.mesh.world import World

from ..health import stopwatch
from ..launching.meeting import meet
from ..planning.clusters import KINDS
from .fitting import Sample

SMALLEST = 4 << 10
"""Bytes of the smallest message; each further one has 8 times as many."""
MOST = 16
"""Largest group that is measured, beside a node's ranks and all of them."""
COPIED = 64 << 20
"""Bytes of the copy that measures memory."""
SQUARE = {"cpu": 1024, "cuda": 8192}
"""Rows of the square product that is measured beside those of the model."""
LONGEST = 2e10
"""FLOPs of a product on a CPU, whose rows are limited to that."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Shape = tuple[int, int, int]
"""Rows, columns and depth of a product."""


def worker(device: Device, largest: int, repeat: int, shapes: Sequence[Shape]) -> Mapping[str, Any]:
    """Measure on all ranks; each returns the same.

    Args:
        device: where.
        largest: bytes of the largest message.
        repeat: how often; the shortest time counts.
        shapes: of the model's products.
    """
    place = World.here()
    with DistributedContext.join(Layout(dp_shard=place.size), device, meet=meet) as context:
        samples = [asdict(one) for one in collectives(context, largest, repeat)]
        products = {
            name: _everybody(context, [product(context, shape, dtype, repeat) for shape in (*shapes, _square(context))])
            for name, dtype in DTYPES.items()
        }
        copied = _everybody(context, [2 * COPIED / _copy(context, repeat)])[0]
        return {
            "code": 0,
            "samples": samples,
            "products": products,
            "bandwidth": copied,
            "memory": _memory(context),
            "local": place.local_size,
            "world": place.size,
            "device": _name(context.device),
            "backend": dist.get_backend(),
        }


def collectives(context: DistributedContext, largest: int, repeat: int) -> Iterator[Sample]:
    """Time every kind over every size of groups of neighbours, all groups at once; the slowest rank counts."""
    world, local = context.world, context.place.local_size
    sizes = [n for n in range(2, world + 1) if world % n == 0 and (n <= MOST or n in (local, world))]
    for ranks in sizes:
        groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        group = groups[context.rank // ranks]
        for kind in KINDS:
            if kind == "send" and ranks % 2:
                continue
            held = SMALLEST
            while held <= largest:
                call = _call(kind, context, group, ranks, held)
                yield Sample(kind, ranks, held, _slowest(context, call, repeat))
                held *= 8


def _call(kind: str, context: DistributedContext, group: Any, ranks: int, held: int) -> Callable[[], object]:
    """A collective with so many bytes of fp32 on the larger side."""
    count = -(-held // 4 // ranks) * ranks
    whole = torch.ones(count, device=context.device)
    part, other = whole[: count // ranks].clone(), torch.empty_like(whole)
    at = context.rank % ranks
    partner = context.rank - at + (at + ranks // 2) % ranks
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(other, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send": lambda: dist.send(whole, partner, group) if at < ranks // 2 else dist.recv(other, partner, group),
    }
    return calls[kind]


def _slowest(context: DistributedContext, call: Callable[[], object], repeat: int) -> float:
    """The shortest time in which all ranks have done the call."""
    times = []
    for _ in range(repeat + 1):
        context.barrier()
        elapsed = stopwatch(context.device)
        call()
        times.append(elapsed())
    slowest = torch.tensor(times[1:], device=context.device, dtype=torch.float64)
    return float(context.all_reduce(slowest, "max").min())


def product(context: DistributedContext, shape: Shape, dtype: torch.dtype, repeat: int) -> float:
    """FLOP/s of a matrix product, the best of some; on a CPU of fewer rows if it would take seconds.

    Args:
        context: whose device multiplies; all ranks at once.
        shape: rows, columns and depth.
        dtype: of both matrices.
        repeat: how often.
    """
    rows, columns, depth = shape
    if context.device.type == "cpu":
        rows = max(min(rows, int(LONGEST / (2 * columns * depth))), 16)
    one = torch.randn(rows, depth, device=context.device).to(dtype)
    other = torch.randn(columns, depth, device=context.device).to(dtype)
    return 2.0 * rows * columns * depth / _shortest(context, lambda: one @ other.T, repeat)


def _copy(context: DistributedContext, repeat: int) -> float:
    one = torch.ones(COPIED // 4, device=context.device)
    other = torch.empty_like(one)
    return _shortest(context, lambda: other.copy_(one), repeat)


def _shortest(context: DistributedContext, call: Callable[[], Tensor], repeat: int) -> float:
    call()
    context.barrier()
    times = []
    for _ in range(repeat):
        elapsed = stopwatch(context.device)
        call()
        times.append(elapsed())
    return min(times)


def _everybody(context: DistributedContext, mine: list[float]) -> list[float]:
    """The median of all ranks."""
    return [median(column) for column in zip(*context.gather_objects(mine), strict=True)]


def _square(context: DistributedContext) -> Shape:
    size = SQUARE.get(context.device.type, 1024)
    return size, size, size


def _memory(context: DistributedContext) -> int:
    """Bytes that a rank may use."""
    if context.device.type == "cuda":
        return int(torch.cuda.get_device_properties(context.device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // context.place.local_size


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"CPU, {cores} core{'s' * (cores != 1)}"

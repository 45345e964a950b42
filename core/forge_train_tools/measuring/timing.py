"""Times of collectives, matrix products and memory on all ranks at once, as training has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Device, Layout
from forge_train.mesh.world import World

from ..health import stopwatch
from ..launching.meeting import meet
from ..planning.clusters import KINDS
from ..planning.work import Work
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
BETWEEN = {"cpu": 256, "cuda": 2048}
"""Rows of the square product before each collective."""
ROUNDS = 8
"""Products, with or without a collective, that are timed at once."""
SHORTEST = 1e-6
"""Seconds of a collective that costs nothing beside the product."""
LAYERS = 8
"""Times as often as others is a small layer timed, which takes less than a millisecond."""
COLLECTIVES = torch.ops._c10d_functional
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
        launch = _everybody(context, [_launch(context, repeat)])[0]
        return {
            "code": 0,
            "samples": samples,
            "products": products,
            "bandwidth": copied,
            "launch": launch,
            "hides": context.device.type != "cpu",
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
                yield Sample(kind, ranks, held, _between_layers(context, call, repeat))
                held *= 8


def _call(kind: str, context: DistributedContext, group: Any, ranks: int, held: int) -> Callable[[], object]:
    """A collective with so many bytes of fp32 on the larger side, begun and waited for as DTensors do it."""
    count = -(-held // 4 // ranks) * ranks
    whole = torch.ones(count, device=context.device)
    part, name = whole[: count // ranks].clone(), group.group_name
    at = context.rank % ranks
    partner = context.rank - at + (at + ranks // 2) % ranks
    if kind == "send":
        return lambda: dist.send(whole, partner, group) if at < ranks // 2 else dist.recv(whole, partner, group)
    begin: dict[str, Callable[[], Tensor]] = {
        "all_reduce": lambda: COLLECTIVES.all_reduce(whole, "sum", name),
        "all_gather": lambda: COLLECTIVES.all_gather_into_tensor(part, ranks, name),
        "reduce_scatter": lambda: COLLECTIVES.reduce_scatter_tensor(whole, "sum", ranks, name),
        "all_to_all": lambda: COLLECTIVES.all_to_all_single(
            whole, [count // ranks] * ranks, [count // ranks] * ranks, name
        ),
    }
    return lambda: COLLECTIVES.wait_tensor(begin[kind]())


def _between_layers(context: DistributedContext, call: Callable[[], object], repeat: int) -> float:
    """Seconds that a call adds to a product before it, as layers have it: ranks come to it apart, and their cores have
    work beside it. Alone, one after the other, a small message is gathered up to three times as fast."""
    size = BETWEEN.get(context.device.type, 256)
    one = torch.randn(size, size, device=context.device)
    both: list[float] = []
    alone: list[float] = []
    for _ in range(repeat + 1):
        for times, act in ((alone, lambda: None), (both, call)):
            context.barrier()
            elapsed = stopwatch(context.device)
            for _ in range(ROUNDS):
                one @ one
                act()
            times.append(elapsed() / ROUNDS)
    every = torch.tensor([alone[1:], both[1:]], device=context.device, dtype=torch.float64)
    least = context.all_reduce(every, "max").min(1).values
    return max(float(least[1] - least[0]), SHORTEST)


def product(context: DistributedContext, shape: Shape, dtype: torch.dtype, repeat: int) -> float:
    """FLOP/s of a layer's matrix product and of the two for its gradients, the best of some; on a CPU of fewer rows if
    they would take seconds.

    Args:
        context: whose device multiplies; all ranks at once.
        shape: rows, columns and depth.
        dtype: of all matrices.
        repeat: how often.
    """
    rows, columns, depth = shape
    if context.device.type == "cpu":
        rows = max(min(rows, int(LONGEST / (6 * columns * depth))), 16)
    inputs = torch.randn(rows, depth, device=context.device).to(dtype)
    weight = torch.randn(columns, depth, device=context.device).to(dtype)
    gradient = torch.randn(rows, columns, device=context.device).to(dtype)

    def layer() -> None:
        inputs @ weight.T
        gradient @ weight
        gradient.T @ inputs

    return 6.0 * rows * columns * depth / _shortest(context, layer, repeat)


def _launch(context: DistributedContext, repeat: int) -> float:
    """Seconds of a kernel that has next to nothing to do, with its share of modules and autograd: those of a small
    layer."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(context.device)
    inputs, count = torch.ones(1, 4, 16, device=context.device), [0]

    def step() -> None:
        layer(inputs).sum().backward()

    def tell(*kernel: object) -> None:
        count[0] += 1

    with Work(tell):
        step()
    return _shortest(context, step, LAYERS * repeat) / count[0]


def _copy(context: DistributedContext, repeat: int) -> float:
    one = torch.ones(COPIED // 4, device=context.device)
    other = torch.empty_like(one)
    return _shortest(context, lambda: other.copy_(one), repeat)


def _shortest(context: DistributedContext, call: Callable[[], object], repeat: int) -> float:
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

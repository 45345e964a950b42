"""A pipeline as it is planned: its stages, its simulated timeline, and the schedules that it could follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_train_kit.pipeline.timetable import Timetable

from .timeline import PartCost, Timeline, simulate

if TYPE_CHECKING:
    from . import Memory
    from .roofline import Device
    from .stages import Look
    from .traffic import Traffic


@dataclass(frozen=True)
class Stage:
    """Memory and traffic of a rank of one stage."""

    parts: tuple[int, ...]
    parameters: int
    """Of its parts, of all ranks that share them."""
    flops_share: float | None
    """Of the model's FLOPs per token; None where it does not declare them."""
    in_flight: Mapping[int, int]
    """Part → the most micro-batches at once whose activations are kept."""
    kept: float
    """The most bytes at once of what forward passes keep for backward passes; part of `memory.activations`."""
    memory: Memory
    communication: Sequence[Traffic]
    expected_bytes: Mapping[str, float]


@dataclass(frozen=True)
class Alternative:
    """A schedule, compared with others. `problem` says why it can't be followed, and leaves the rest None."""

    name: str
    current: bool = False
    """True for the run's own schedule."""
    parts: int | None = None
    """Of each rank. Where there are other parts than the run's, they are taken to be of equal cost."""
    duration: float | None = None
    """Of a step, in the pipeline's unit."""
    bubble: float | None = None
    in_flight: float | None = None
    """The most micro-batches that a rank keeps the activations of, in whole shares of it (two parts of two that each
    have one micro-batch in flight are one)."""
    kept: float | None = None
    """Bytes of these."""
    problem: str = ""


@dataclass(frozen=True)
class Pipeline:
    """A step of a pipeline, simulated with what the model says of its parts' costs."""

    stages: tuple[Stage, ...]
    timeline: Timeline
    unit: str
    """Of its times: seconds at a device's peak, or shares of the mean forward pass of a part."""
    bubble: float
    alternatives: tuple[Alternative, ...]


def pipeline(
    looks: Sequence[Look], memories: Sequence[Memory], *, tokens: int, shared: int, device: Device | None, peak: float
) -> Pipeline | None:
    """Combine the stages; None if no executor declares the work of its ranks.

    Args:
        looks: at each stage.
        memories: of each.
        tokens: of a micro-batch, on one rank.
        shared: number of ranks that share each of its products (tensor parallelism).
        device: source of times, by its data sheet; without it, they are relative.
        peak: its FLOP/s.
    """
    passing = [look.pipeline for look in looks]
    first = passing[0]
    if first is None or any(one is None for one in passing):
        return None
    table = first.timetable
    costs = _costs(looks, table)
    total = sum(cost.forward for cost in costs)
    scale = tokens / shared / peak if device else len(costs) / total
    scaled = [
        PartCost(c.forward * scale, c.input_gradient * scale, c.weight_gradient * scale, c.sends, c.keeps)
        for c in costs
    ]
    timeline = simulate(table, scaled, bytes_per_second=device.inside if device else 0.0)
    declared = all(flops is not None for look in looks for flops in look.flops)
    stages = tuple(
        Stage(
            parts=tuple(table.parts_of(rank)),
            parameters=look.parameters.total,
            flops_share=sum(costs[part].forward for part in table.parts_of(rank)) / total if declared else None,
            in_flight=timeline.in_flight(rank),
            kept=timeline.activations(rank),
            memory=memories[rank],
            communication=look.traffic,
            expected_bytes=look.expected_bytes,
        )
        for rank, look in enumerate(looks)
    )
    unit = "seconds" if device else "forward passes of a mean part"
    return Pipeline(stages, timeline, unit, timeline.bubble, tuple(_compared(timeline, first.alternatives, device)))


def _costs(looks: Sequence[Look], table: Timetable) -> list[PartCost]:
    """By the FLOPs that parts declare, forward and either half of backward a third each; where one does not, all are
    taken to be equal."""
    found = [PartCost(1.0, 1.0, 1.0)] * table.parts
    declared = all(flops is not None for look in looks for flops in look.flops)
    for rank, look in enumerate(looks):
        if look.pipeline is None:
            continue
        own = zip(table.parts_of(rank), look.flops, look.pipeline.keeps(), strict=True)
        for part, flops, keeps in own:
            each = (flops or 0.0) / 3 if declared else 1.0
            found[part] = PartCost(each, each, each, look.border, keeps)
    return found


def _compared(timeline: Timeline, others: Mapping[str, Timetable | str], device: Device | None) -> list[Alternative]:
    found = []
    for name, table in others.items():
        if isinstance(table, str):
            found.append(Alternative(name, problem=table))
            continue
        ranks, parts = len(table.ranks), table.parts // len(table.ranks)
        same = table.placement == timeline.timetable.placement
        costs = timeline.costs if same else _even(timeline.costs, table.parts)
        made = simulate(table, costs, bytes_per_second=device.inside if device else 0.0)
        found.append(
            Alternative(
                name,
                current=table.ranks == timeline.timetable.ranks,
                parts=parts,
                duration=made.duration,
                bubble=made.bubble,
                in_flight=max(sum(made.in_flight(rank).values()) / parts for rank in range(ranks)),
                kept=max(map(made.activations, range(ranks))),
            )
        )
    return found


def _even(costs: Sequence[PartCost], parts: int) -> list[PartCost]:
    """The same model in another number of parts, all alike."""
    forward, input_gradient, weight_gradient, keeps = (
        sum(getattr(cost, name) for cost in costs) / parts
        for name in ("forward", "input_gradient", "weight_gradient", "keeps")
    )
    sends = max(cost.sends for cost in costs)
    return [PartCost(forward, input_gradient, weight_gradient, sends, keeps)] * parts

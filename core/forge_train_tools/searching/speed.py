"""Time of a step on a cluster, by the closed forms of its work and its traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..planning.clusters import Cluster
from .candidates import LAYERS, Candidate
from .forms import Memory, Sent
from .schedules import Schedule

Bound = Literal["compute", "communication", "bubble"]


@dataclass(frozen=True)
class Speed:
    """Seconds of a step, and what they are spent on."""

    step: float
    compute: float
    """In matrix products and attention, at the cluster's efficiency, recomputation included."""
    between: float
    """In kernels between those, each of which reads and writes memory, and in launching kernels."""
    blocking: float
    """In collectives that each layer waits for, and in messages between stages."""
    exposed: float
    """In collectives of data parallelism that compute does not hide."""
    idle: float
    """In a pipeline's bubble."""
    update: float
    """In the optimizer, by the bandwidth of memory."""
    bubble: float
    """Share of the step without work."""
    traffic: tuple[tuple[str, float], ...]
    """Level of the network → bytes that a rank sends over it."""

    @property
    def bound(self) -> Bound:
        largest: dict[Bound, float] = {
            "compute": self.compute + self.between, "communication": self.blocking + self.exposed, "bubble": self.idle,
        }  # fmt: skip
        return max(largest, key=lambda one: largest[one])


def speed(
    c: Candidate, cluster: Cluster, precision: str, flops: float, apart: Mapping[str, float], between: float,
    kernels: float, sent: Sequence[Sent], memory: Memory, schedule: Schedule | None,
) -> Speed:  # fmt: skip
    """The time of a step. Where a cluster's devices work beside their hosts, launches and collectives of data
    parallelism are hidden behind kernels as far as those take longer; collectives that each layer waits for are not.

    Args:
        c: the layout.
        cluster: its devices and links.
        precision: of `train.precision`.
        flops: of a micro-batch, on the rank with most.
        apart: those among them that are done at another peak, by its key.
        between: bytes that the kernels between products read and write in a step.
        kernels: of a step.
        sent: collectives of a step.
        memory: at rest, for the optimizer's step.
        schedule: of a pipeline.
    """
    seconds = (flops - sum(apart.values())) / cluster.flops(precision)
    seconds += sum(own / cluster.flops(key) for key, own in apart.items())
    compute = c.accumulation * seconds / cluster.efficiency
    blocking = hidden = 0.0
    levels: dict[str, float] = {link.level: 0.0 for link in cluster.links}
    for one in sent:
        span = c.spans[one.axes]
        seconds = cluster.seconds(one.kind, one.bytes, one.ranks, one.calls, cluster.near(span, one.ranks))
        levels[cluster.link(span).level] += one.bytes
        if one.axes in LAYERS or one.axes == "pp":
            blocking += seconds
        else:
            hidden += seconds
    moving, launching = between / cluster.bandwidth, kernels * cluster.launch
    moving = max(moving, launching - compute) if cluster.hides else moving + launching
    busy = compute + moving + blocking
    idle = busy * max(schedule.stretch - 1, 0.0) if schedule else 0.0
    exposed = max(hidden - compute - moving, 0.0) if cluster.hides else hidden
    update = 2 * (memory.parameters + memory.optimizer) / cluster.bandwidth
    step = busy + idle + exposed + update
    traffic = tuple((level, size) for level, size in levels.items())
    return Speed(step, compute, moving, blocking, exposed, idle, update, idle / step, traffic)

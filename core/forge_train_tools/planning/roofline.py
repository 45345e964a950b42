"""Upper bound on the speed of a step, on devices known by their data sheets.

Kernels take the time of their operations at the device's peak or of their bytes at its memory's bandwidth, whichever
is longer (Williams et al. 2009, doi:10.1145/1498765.1498785). Everything but matrix products is fused into them, and
collectives, which take the time of their bytes on the slowest link they need, are hidden behind them. A real step is
slower.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from .clusters import RINGS, Cluster, cluster, names

if TYPE_CHECKING:
    from collections import Counter

    from forge_train.config.sections import Precision

    from .traffic import Traffic

Bound = Literal["compute", "memory", "communication"]


@dataclass(frozen=True)
class Device:
    """A data sheet: dense peaks in FLOP/s, bandwidths of one direction in bytes/s, memory in bytes."""

    name: str
    narrow: float
    """bf16 and fp16 in tensor cores, without sparsity."""
    single: float
    """fp32 outside of them: torch multiplies in fp32 unless told otherwise."""
    bandwidth: float
    memory: float
    """Of 10⁹ bytes to the GB: what the driver and the allocator keep for themselves is about the difference to GiB."""
    inside: float
    """Between devices of a node: half of what is advertised for both directions."""
    across: float
    """Between nodes, for each device: one network adapter each, as in the vendors' reference systems."""
    whole: bool = False
    """True if `across` was measured in collectives, with as many adapters as they used."""

    @classmethod
    def of(cls, one: Cluster) -> Device:
        """The device of a cluster, with its fastest link and its slowest."""
        inside, across = one.links[0].bandwidth, one.links[-1].bandwidth
        peaks, whole = (one.flops("bf16"), one.flops("fp32")), bool(one.links[-1].measured)
        return cls(one.name, *peaks, one.bandwidth, one.memory, inside, across, whole)

    def rate(self, kind: str, ranks: int, per_node: int) -> float:
        """Bytes/s that each rank of a collective sends. A ring uses the adapters of all its ranks on a node."""
        if per_node >= ranks:
            return self.inside
        adapters = per_node if kind in RINGS and not self.whole else 1
        return min(self.inside, adapters * self.across) if adapters > 1 else self.across

    def peak(self, precision: Precision) -> float:
        return self.single if precision == "fp32" else self.narrow


DEVICES = {name: Device.of(cluster(name)) for name in names()}
"""Devices known to `forge plan --device`."""


class Kernel(NamedTuple):
    """Work of one kernel."""

    flops: float
    bytes: int
    """Read and written."""
    fusible: bool
    """True if a compiler may fuse it into another kernel: neither a matrix product nor the optimizer."""
    attention: bool = False


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step of a rank, and what follows."""

    device: str
    compute: float
    """In kernels whose operations take longer than their bytes."""
    attention: float
    """In those of them that are attention."""
    operands: float
    """In which the others' operands and results are read and written."""
    memory: float
    """In those whose bytes take longer."""
    fusible: float
    """In those between them, if each reads and writes the memory for itself as in eager execution."""
    communication: float
    step: float
    """With everything that is fusible fused, every collective hidden, and a pipeline's bubble."""
    bound: Bound
    """Bottleneck of the step."""
    tokens_per_second: float
    """Of all ranks, in such steps."""
    unfused_tokens_per_second: float
    """The same where nothing is fused."""
    mfu: float | None
    """At the first of the two rates; None where the model does not declare its FLOPs."""
    fits: bool | None
    """True if the step's peak is within the device's memory; None if that is unknown."""
    memory_bytes: float
    """Memory of the device."""


def roofline(
    device: Device,
    precision: Precision,
    kernels: Counter[Kernel],
    sent: Iterable[Traffic],
    *,
    tokens: int,
    ranks: int,
    flops_per_token: float | None,
    peak_bytes: int | None,
    stretch: float = 1.0,
) -> Roofline:
    """The roofline of a step.

    Args:
        device: its data sheet.
        precision: in which it multiplies.
        kernels: kernel → how often.
        sent: collectives of a step.
        tokens: of a step, of all ranks.
        ranks: how many there are.
        flops_per_token: the model's own.
        peak_bytes: of memory.
        stretch: how much longer a step takes than the rank's own work, as it waits for others in a pipeline.
    """
    peak = device.peak(precision)
    compute = attention = operands = memory = fusible = 0.0
    for kernel, times in kernels.items():
        by_flops, by_bytes = times * kernel.flops / peak, times * kernel.bytes / device.bandwidth
        if kernel.fusible:
            fusible += by_bytes
        elif by_flops > by_bytes:
            compute += by_flops
            attention += by_flops * kernel.attention
            operands += by_bytes * (not kernel.attention)
        else:
            memory += by_bytes
    communication = sum(one.bytes / device.rate(one.kind, one.ranks, one.per_node) for one in sent)
    step = max(compute + memory, communication) * stretch
    busy: Bound = "compute" if compute > memory else "memory"
    rate = tokens / step
    return Roofline(
        device=device.name,
        compute=compute,
        attention=attention,
        operands=operands,
        memory=memory,
        fusible=fusible,
        communication=communication,
        step=step,
        bound="communication" if communication >= compute + memory else busy,
        tokens_per_second=rate,
        unfused_tokens_per_second=tokens / (max(compute + memory + fusible, communication) * stretch),
        mfu=None if flops_per_token is None else rate * flops_per_token / (ranks * peak),
        fits=None if peak_bytes is None else peak_bytes <= device.memory,
        memory_bytes=device.memory,
    )

"""Planning of a run without memory for a single tensor.

The model is composed on the meta device for one rank of a world that does not exist; a step of it is then rehearsed on
fake tensors, which have shapes and dtypes but no data, and everything that step keeps, sends and computes is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train.base.errors import ConfigError
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train.registry.setup import Setup

from . import advice, meshes
from .clusters import cluster
from .optimizer import ParameterSet, total_sets
from .pipeline import Pipeline, pipeline
from .roofline import DEVICES, Device, Roofline, roofline
from .topology import Topology
from .traffic import Traffic

if TYPE_CHECKING:
    from .examples import RowItems
    from .parameters import Parameters
    from .stages import Look

FLOPS_CONVENTION = "forward and backward, causal attention, a multiply-add is 2; the input embedding is a look-up"
PER_NODE = 8
"""Ranks of a node, where nobody says."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, in a step after its first; None for what could not be found, and `notes` say why."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None
    unsharded: int | None
    """The most at once of gradients that FSDP2 keeps whole over micro-batches, in the dtype that it reduces them in."""
    activations: int | None
    """The most at once of all that is none of the above: what autograd keeps, gathered weights, results in passing."""
    logits: int | None
    """The most at once of what has the shape of logits; part of `activations`."""
    peak: int | None
    """The most at once of everything; what an allocator rounds up and keeps, and kernels' own workspaces, come on
    top."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A composition, and what it costs."""

    phases: list[dict[str, Any]]
    idle: tuple[str, ...]
    slots: Mapping[str, tuple[str, ...]]
    """Slot or chain → the plugins behind it."""
    meshes: Mapping[str, meshes.Axes]
    """Domain → axis → size, outermost first."""
    nodes: int
    crossing: tuple[str, ...]
    """Axes of the dense and the expert domain along which some neighbours lie on different nodes."""
    parameters: Parameters
    optimizer: tuple[ParameterSet, ...]
    memory: Memory
    communication: list[Traffic]
    expected_bytes: Mapping[str, float]
    """Axis → bytes a rank has to send along it, by the transforms' own count; the global norm and such not counted."""
    accumulation: int
    """Micro-batches of a step."""
    items: Mapping[str, RowItems]
    """Modality → the items that each row is taken to have."""
    flops_per_token: float | None
    """The model's own, as FLOPS_CONVENTION says, and what the items of its row cost; repeated operations (recompute)
    are no part of it."""
    kernel_flops: float
    """FLOPs of the kernels in one rank's step (in the busiest stage of a pipeline), recomputed ones included; masked
    attention counts in full."""
    roofline: Roofline | None
    pipeline: Pipeline | None
    """Its stages and its timeline, where there is one. `memory` is of the stage that needs most, and `communication`
    of the one that sends most."""
    warnings: tuple[str, ...]


def plan(
    setup: Setup,
    *,
    world: int = 1,
    nodes: int = 0,
    device: str | None = None,
    schedules: bool = False,
    on_cuda: bool = False,
    folder: Path = Path("runs/plan"),
) -> Plan:
    """Compose for one rank of `world`, or of each pipeline stage, and rehearse a step of it. Nothing is allocated,
    written or left behind.

    Args:
        setup: a checked configuration and its plugins.
        world: the number of ranks.
        nodes: over how many nodes they are spread; 0 for as many as nodes of `PER_NODE` ranks make.
        device: a name in `DEVICES` or a cluster file, for the roofline; without one, memory is that of the run's own
            device.
        on_cuda: whether memory is that of CUDA's kernels, whatever the run's own device is; a `device` implies it.
        schedules: whether to compare what else a pipeline could follow.
        folder: what plugins are told the run folder is; nothing is written there.

    Raises:
        ConfigError: for a composition that can't be.
    """
    import torch

    from .on_cuda import kernels_of_cuda
    from .parameters import total
    from .stages import look_at_stages

    config = setup.config
    layout = Layout.of(config.parallel, world)
    sheet = _sheet(device)
    place = World(size=world, local_size=per_node(world, nodes))
    topology, domains = Topology.of(place), meshes.domains(layout)
    wanted = config.run.device
    on_cuda = on_cuda or sheet is not None or wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    with kernels_of_cuda() if on_cuda else nullcontext():
        looks = look_at_stages(setup, layout, place, folder, alternatives=schedules)
    memories = [_memory(look) for look in looks]
    fullest = max(range(len(looks)), key=lambda stage: memories[stage].peak or 0)
    memory, busiest = memories[fullest], max(looks, key=lambda look: look.kernel_flops)
    sending = max(looks, key=lambda look: sum(one.bytes for one in look.traffic))
    declared = [flops for look in looks for flops in look.flops]
    flops = None if None in declared else sum(one or 0.0 for one in declared)
    piped = pipeline(
        looks,
        memories,
        tokens=config.train.micro_batch * config.train.sequence,
        shared=layout.tp * layout.cp,
        device=sheet,
        peak=sheet.peak(config.train.precision) if sheet else 1.0,
    )
    roof = None
    if sheet is not None and memory.activations is not None:
        roof = roofline(
            sheet,
            config.train.precision,
            busiest.rehearsed.kernels,
            sending.traffic,
            tokens=config.train.tokens_per_step,
            ranks=world,
            flops_per_token=flops,
            peak_bytes=memory.peak,
            stretch=piped.timeline.stretch if piped else 1.0,
        )
    crossing = tuple(dict.fromkeys(a for d in ("dense", "expert") for a in topology.crossing(domains.get(d, {}))))
    return Plan(
        phases=_phases(looks),
        idle=tuple(name for name in looks[0].idle if all(name in look.idle for look in looks)),
        slots=_slots(setup),
        meshes=domains,
        nodes=topology.nodes,
        crossing=crossing,
        parameters=total([look.parameters for look in _in_order(looks)]),
        optimizer=total_sets([look.sets for look in looks]),
        memory=memory,
        communication=sending.traffic,
        expected_bytes=sending.expected_bytes,
        accumulation=layout.micro_batches(config.train.global_batch, config.train.micro_batch),
        items=looks[0].items,
        flops_per_token=flops,
        kernel_flops=busiest.kernel_flops,
        roofline=roof,
        pipeline=piped,
        warnings=tuple(
            advice.warnings(crossing, layout.table, sending.traffic, looks[fullest].whole, world, sheet, memory)
        ),
    )


def _sheet(device: str | None) -> Device | None:
    return None if device is None else Device.of(cluster(device))


def _in_order(looks: Sequence[Look]) -> list[Look]:
    """Stages in the order of the model: a schedule may place its first part on any rank."""
    passing = looks[0].pipeline
    if passing is None:
        return list(looks)
    return [looks[rank] for rank in dict.fromkeys(passing.timetable.placement)]


def _phases(looks: Sequence[Look]) -> list[dict[str, Any]]:
    """Merge the transforms' reports of all stages."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for look in looks:
        for entry in look.report:
            known = found.setdefault((entry.get("model", ""), entry["slot"]), dict(entry))
            known["matched"] = sorted({*known["matched"], *entry["matched"]})
    return list(found.values())


def _memory(look: Look) -> Memory:
    rehearsed = look.rehearsed
    return Memory(
        parameters=look.held,
        buffers=rehearsed.buffers,
        gradients=rehearsed.gradients,
        optimizer=rehearsed.optimizer,
        unsharded=rehearsed.unsharded,
        activations=rehearsed.activations,
        logits=rehearsed.logits,
        peak=rehearsed.peak,
        notes=tuple(rehearsed.notes),
    )


def per_node(world: int, nodes: int) -> int:
    """Ranks of each node.

    Args:
        world: all ranks.
        nodes: how many; 0 for as many as nodes of `PER_NODE` ranks make.

    Raises:
        ConfigError: if ranks are left over.
    """
    if nodes and world % nodes:
        raise ConfigError(f"{world} ranks can't be spread evenly over {nodes} nodes.")
    return world // nodes if nodes else min(world, PER_NODE)


def _slots(setup: Setup) -> dict[str, tuple[str, ...]]:
    slots = [hook for hook, spec in setup.hooks.specs.items() if spec.kind in ("slot", "chain")]
    filled = {hook: tuple(setup.hooks.acting(hook)) for hook in slots}
    return {hook: names for hook, names in filled.items() if names}


__all__ = ["DEVICES", "FLOPS_CONVENTION", "PER_NODE", "Memory", "Pipeline", "Plan", "Roofline", "Traffic", "plan"]

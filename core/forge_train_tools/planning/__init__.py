"""What a run would be, found without giving memory to a single tensor.

The model is composed on the meta device for one rank of a world that does not exist; a step of it is then rehearsed on
fake tensors, which have shapes and dtypes but no data, and everything that step keeps, sends and computes is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train.contract.hookspecs import KINDS
from forge_train.contract.job import Job
from forge_train.contract.run import Run
from forge_train.ground.errors import ConfigError, nearest
from forge_train.ground.layout import Layout
from forge_train.ground.world import World
from forge_train.registry.setup import Setup

from . import advice, meshes
from .optimizer import ParameterSet, parameter_sets
from .roofline import DEVICES, Device, Roofline, roofline
from .topology import Topology

if TYPE_CHECKING:
    from forge_train.composition.compose import Composition

    from .communication import Names
    from .parameters import Parameters
    from .record import Rehearsed

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
    activations: int | None
    """The most at once of all that is none of the above: what autograd keeps, gathered weights, results in passing."""
    logits: int | None
    """The most at once of what has the shape of logits; part of `activations`."""
    peak: int | None
    """The most at once of everything; what an allocator rounds up and keeps, and kernels' own workspaces, come on
    top."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along one axis, in a step of one rank."""

    kind: str
    axis: str
    ranks: int
    count: int
    bytes: float
    """What the rank sends, by the best algorithm for the kind."""
    crosses_nodes: bool


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
    flops_per_token: float | None
    """The model's own, as FLOPS_CONVENTION says; repeated operations (recompute) are no part of it."""
    kernel_flops: float
    """What the kernels of one rank's step do, repeated ones too; where a mask says what is seen, all is counted."""
    roofline: Roofline | None
    warnings: tuple[str, ...]


def plan(
    setup: Setup,
    *,
    world: int = 1,
    nodes: int = 0,
    device: str | None = None,
    folder: Path = Path("runs/plan"),
) -> Plan:
    """Compose for one rank of `world`, and rehearse a step of it. Nothing is allocated, written or left behind.

    Args:
        setup: a checked configuration and its plugins.
        world: the number of ranks.
        nodes: over how many nodes they are spread; 0 for as many as nodes of `PER_NODE` ranks make.
        device: a name in `DEVICES`, for the roofline.
        folder: what plugins are told the run folder is; nothing is written there.

    Raises:
        ConfigError: for a composition that can't be.
    """
    from forge_train.composition.compose import compose
    from forge_train.ground.tensors import held_bytes

    from .alike import Units, rehearse_alike
    from .communication import Names
    from .imagined import imagined
    from .parameters import count, giants
    from .record import counted
    from .rehearsal import imagine_optimizer, rehearse

    config = setup.config
    layout = Layout.of(config.parallel, world)
    sheet = _sheet(device)
    with imagined(layout, World(size=world, local_size=_per_node(world, nodes))) as context:
        job = Job.of(config, setup.hooks, Run(folder), context)
        units = Units()
        composition = compose(job, allocate=False, change=units.look)
        model, names = composition.model, Names(context)
        parameters, whole = count(model, names), giants(model)
        stored = {id(p): p for one in (model, *job.models.values()) for p in one.parameters()}  # frozen ones, too
        held = held_bytes(stored.values())
        flops = model.flops_per_token(config.train.sequence)
        alike = rehearse_alike(job, composition, units)
        recorded = alike or rehearse(job, model)
        rehearsed = counted(recorded)
        sets = parameter_sets(imagine_optimizer(job, model).param_groups) if alike else recorded.sets
        memory = _memory(held, rehearsed)
        traffic = _traffic(rehearsed, names)
        topology, domains = Topology.of(context.place), meshes.domains(layout)
        expected_bytes = _expected_bytes(composition, names)
    roof = None
    if sheet is not None and memory.activations is not None:
        roof = roofline(
            sheet,
            config.train.precision,
            rehearsed.kernels,
            [(one.bytes, one.crosses_nodes) for one in traffic],
            tokens=config.train.tokens_per_step,
            ranks=world,
            flops_per_token=flops,
            peak_bytes=memory.peak,
        )
    crossing = tuple(dict.fromkeys(a for d in ("dense", "expert") for a in topology.crossing(domains.get(d, {}))))
    return Plan(
        phases=composition.report,
        idle=composition.idle,
        slots=_slots(setup),
        meshes=domains,
        nodes=topology.nodes,
        crossing=crossing,
        parameters=parameters,
        optimizer=sets,
        memory=memory,
        communication=traffic,
        expected_bytes=expected_bytes,
        accumulation=layout.micro_batches(config.train.global_batch, config.train.micro_batch),
        flops_per_token=flops,
        kernel_flops=sum(kernel.flops * times for kernel, times in rehearsed.kernels.items()),
        roofline=roof,
        warnings=tuple(advice.warnings(crossing, traffic, whole, world, sheet, memory)),
    )


def _sheet(device: str | None) -> Device | None:
    if device is None:
        return None
    if device.lower() not in DEVICES:
        raise ConfigError(f"There is no data sheet of a device {device!r}.{nearest(device, DEVICES)}")
    return DEVICES[device.lower()]


def _per_node(world: int, nodes: int) -> int:
    if nodes and world % nodes:
        raise ConfigError(f"{world} ranks can't be spread evenly over {nodes} nodes.")
    return world // nodes if nodes else min(world, PER_NODE)


def _slots(setup: Setup) -> dict[str, tuple[str, ...]]:
    filled = {hook: tuple(setup.hooks.acting(hook)) for hook, kind in KINDS.items() if kind in ("slot", "chain")}
    return {hook: names for hook, names in filled.items() if names}


def _memory(parameters: int, rehearsed: Rehearsed) -> Memory:
    return Memory(
        parameters=parameters,
        buffers=rehearsed.buffers,
        gradients=rehearsed.gradients,
        optimizer=rehearsed.optimizer,
        activations=rehearsed.activations,
        logits=rehearsed.logits,
        peak=rehearsed.peak,
        notes=tuple(rehearsed.notes),
    )


def _traffic(rehearsed: Rehearsed, names: Names) -> list[Traffic]:
    """What was sent, by kind and axis, most bytes first."""
    sums: dict[tuple[str, str, int, bool], list[float]] = {}
    for one, times in rehearsed.sent.items():
        key = (one.kind, names.of(one.group), one.ranks, names.crosses_nodes(one.group))
        total = sums.setdefault(key, [0, 0.0])
        total[0] += times
        total[1] += times * one.sent
    found = [Traffic(kind, axis, ranks, int(n), size, far) for (kind, axis, ranks, far), (n, size) in sums.items()]
    return sorted(found, key=lambda one: -one.bytes)


def _expected_bytes(composition: Composition, names: Names) -> dict[str, float]:
    found: dict[str, float] = {}
    for axis, size in composition.expected_bytes.items():
        name = names.of_mesh(axis)
        found[name] = found.get(name, 0.0) + size
    return found


__all__ = ["DEVICES", "FLOPS_CONVENTION", "PER_NODE", "Memory", "Plan", "Roofline", "Traffic", "plan"]

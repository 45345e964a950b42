"""`forge plan`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from forge_train.config.layers import Request
from forge_train.present import gib, short

from . import screen
from .options import json_option, run_options

if TYPE_CHECKING:
    from forge_train.planning import Plan
    from forge_train.setup import Setup


@click.command(short_help="Show what would be composed, without allocating it.")
@run_options()
@click.option("--world", default=1, show_default=True, type=click.IntRange(min=1), metavar="N", help="Number of ranks.")
@json_option
def plan(request: Request, world: int, as_json: bool) -> None:
    """Compose CONFIG for N ranks on the meta device, and show what comes of it: nothing is allocated or written."""
    from forge_train.planning import plan as make
    from forge_train.setup import resolve

    setup = resolve(request, world=world)
    made = make(setup, world=world)
    if as_json:
        click.echo(json.dumps(_as_json(made), indent=1))
    else:
        _show(made, setup, request, world)


def _as_json(made: Plan) -> dict[str, object]:
    return {
        "phases": made.phases,
        "idle": list(made.idle),
        "slots": {slot: list(names) for slot, names in made.slots.items()},
        "meshes": made.meshes,
        "parameters": dataclasses.asdict(made.parameters),
        "memory": {**dataclasses.asdict(made.memory), "total": made.memory.total},
        "communication": made.communication,
        "flops_per_token": made.flops_per_token,
    }


def _show(made: Plan, setup: Setup, request: Request, world: int) -> None:
    train = setup.config.train
    ranks = "1 process" if world == 1 else f"{world} processes"
    screen.line(f"{setup.config.source} on {ranks}", "bold")
    screen.line(f"{train.global_batch} sequences of {train.sequence} tokens a step, {train.micro_batch} at a time")
    _show_phases(made)
    screen.heading("Slots")
    aside = _stepped_aside(setup, request)
    rows = []
    for slot, names in made.slots.items():
        notes = ["default"] if setup.config.defaults.get(slot) in names else []
        notes += [f"in place of {aside[slot]}"] if slot in aside else []
        rows.append((slot, ", ".join(names), "; ".join(notes)))
    screen.table(("", "", ""), rows)
    screen.heading("Meshes")
    screen.table(
        ("", ""),
        [(name, " × ".join(f"{axis} {size}" for axis, size in axes.items())) for name, axes in made.meshes.items()],
    )
    _show_costs(made)


def _show_phases(made: Plan) -> None:
    screen.heading("Phases")
    if made.phases:
        rows = [
            (entry["phase"], entry["slot"], entry["plugin"], _few(entry["matched"]), entry["note"])
            for entry in made.phases
        ]
        screen.table(("phase", "slot", "plugin", "matched", "note"), rows)
    else:
        screen.line("  no plugin changes the model")
    if made.idle:
        screen.line(f"  idle at this size: {', '.join(made.idle)}", "dim")


def _show_costs(made: Plan) -> None:
    counts, memory = made.parameters, made.memory
    screen.heading("Parameters")
    tops = [(name, f"{count:,}") for name, count in counts.by_module.items()]
    screen.table(("", ""), [*tops, ("total", f"{counts.total:,}")], right=(1,))
    if counts.trainable != counts.total:
        screen.line(f"  {counts.trainable:,} of them are trained")
    for group in counts.tied:
        screen.line(f"  tied: {' = '.join(group)}", "dim")
    screen.heading("Memory of a rank")
    unknown = "not known"
    rows = [
        ("parameters", gib(memory.parameters), "exact"),
        ("gradients", gib(memory.gradients), "exact"),
        ("optimizer", unknown if memory.optimizer is None else gib(memory.optimizer), "exact, after its first step"),
        (
            "activations",
            unknown if memory.activations is None else gib(memory.activations),
            "what autograd keeps of a micro-batch",
        ),
        ("total", gib(memory.total), "estimate: what kernels need in passing comes on top"),
    ]
    screen.table(("", "", ""), rows, right=(1,))
    for note in memory.notes:
        screen.line(f"  {note}", "yellow")
    screen.heading("Work")
    if made.flops_per_token is None:
        screen.line("  the model does not declare its FLOPs")
    else:
        from forge_train.planning import FLOPS_CONVENTION

        screen.line(f"  {short(made.flops_per_token)} FLOPs per token ({FLOPS_CONVENTION})")


def _few(names: list[str]) -> str:
    more = f", … {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)}: {', '.join(names[:3])}{more}"


def _stepped_aside(setup: Setup, request: Request) -> dict[str, str]:
    """Slot → the default that another plugin took it from."""
    from forge_train.config.layers import lay

    defaults = lay(request).tree.below(("defaults",))
    wanted = {key[0]: str(value.value) for key, value in defaults.items() if len(key) == 1}
    return {slot: name for slot, name in wanted.items() if name and slot not in setup.config.defaults}

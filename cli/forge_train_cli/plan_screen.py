"""The screen of `forge plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_train.base.format import format_bytes
from forge_train_kit.format import (
    format_column,
    format_count,
    format_length,
    format_phase,
    format_seconds,
    format_unit,
)
from forge_train_tools.configuration.request import Request
from forge_train_tools.planning import FLOPS_CONVENTION
from forge_train_tools.planning.meshes import groups

from . import pipeline, screen
from .abbreviate import abbreviated, group_list

if TYPE_CHECKING:
    from forge_train.registry.setup import Setup
    from forge_train_tools.planning import Plan


def show(made: Plan, setup: Setup, request: Request, world: int) -> None:
    """Print a plan, part by part."""
    train = setup.config.train
    ranks = ("1 process" if world == 1 else f"{world} processes") + (
        f" on {made.nodes} nodes" if made.nodes > 1 else ""
    )
    passes = "" if made.accumulation == 1 else f", {made.accumulation} micro-batches"
    screen.line(f"{setup.config.source} on {ranks}", "bold")
    screen.line(
        f"{train.global_batch:,} sequences of {train.sequence:,} tokens a step "
        f"({format_count(train.tokens_per_step)} tokens), {train.micro_batch} at a time{passes}"
        + (f"; {format_length(train.epochs, train.total_steps)}" if train.epochs else "")
    )
    if train.batch_warmup:
        first = ", ".join(f"{one.global_batch:,} for {one.steps:,} steps" for one in train.batch_warmup)
        screen.line(f"At first, sequences a step: {first}")
    _show_phases(made)
    _show_slots(made, setup, request)
    _show_meshes(made)
    _show_parameters(made)
    _show_optimizer(made)
    _show_memory(made)
    if made.communication:
        _show_communication(made)
    _show_work(made)
    if made.pipeline is not None:
        pipeline.show(made.pipeline)
    if made.warnings:
        screen.heading("Warnings")
        for warning in made.warnings:
            screen.line(f"  {warning}", "yellow")


def _show_phases(made: Plan) -> None:
    screen.heading("Phases")
    if made.phases:
        rows = [
            (
                format_phase(one["phase"], one["slot"]),
                _slot(one),
                one["plugin"],
                abbreviated(one["matched"]),
                one["note"],
            )
            for one in made.phases
        ]
        screen.table(("phase", "slot", "plugin", "matched", "note"), rows)
    else:
        screen.line("  No plugin changes the model.")
    if made.idle:
        screen.line(f"  Idle at this size: {', '.join(made.idle)}", "dim")


def _slot(entry: Mapping[str, Any]) -> str:
    """A transform's slot, and the name of its model if that is not the first."""
    return f"{entry['model']}: {entry['slot']}" if "model" in entry else str(entry["slot"])


def _show_slots(made: Plan, setup: Setup, request: Request) -> None:
    screen.heading("Slots")
    aside = _stepped_aside(setup, request)
    rows = []
    for slot, names in made.slots.items():
        notes = ["default"] if setup.config.defaults.get(slot) in names else []
        notes += [f"in place of {aside[slot]}"] if slot in aside else []
        rows.append((slot, ", ".join(names), "; ".join(notes)))
    screen.table(("", "", ""), rows)


def _show_meshes(made: Plan) -> None:
    screen.heading("Meshes")
    for domain, axes in made.meshes.items():
        screen.line(f"  {domain}: {' × '.join(f'{axis} {size}' for axis, size in axes.items())}")
        rows = [
            (f"{axis} {size}", group_list(groups(axes, axis)), "crosses nodes" if axis in made.crossing else "")
            for axis, size in axes.items()
            if size > 1 and domain != "batch"  # whose ranks are those of `dense`, the data-parallel axes in one
        ]
        if rows:
            screen.table(("", "", ""), rows, indent=4)


def _show_parameters(made: Plan) -> None:
    counts = made.parameters
    screen.heading("Parameters")
    rows = [(one.module, f"{one.total:,}", f"{one.held:,}", one.placement) for one in counts.groups]
    rows.append(("total", f"{counts.total:,}", f"{counts.held:,}", ""))
    if counts.held == counts.total:
        screen.table(("", ""), [row[:2] for row in rows], right=(1,))
    else:
        whose = "of a rank" if made.pipeline is None else "of the fullest rank"
        screen.table(("", "all", whose, "split"), rows, right=(1, 2))
    if counts.total >= 1_000_000:
        held = "" if counts.held == counts.total else f", {_billions(counts.held)} of a rank"
        screen.line(f"  {_billions(counts.total)} parameters{held}")
    if counts.trainable != counts.total:
        screen.line(f"  {counts.trainable:,} of them are trained")
    for group in counts.tied:
        screen.line(f"  tied: {' = '.join(group)}", "dim")


def _show_optimizer(made: Plan) -> None:
    screen.heading("Parameter groups")
    rows = [
        (
            one.match or "–",
            f"{one.parameters:,}",
            f"{one.elements:,}",
            "–" if one.lr is None else f"{one.lr:.3g}",
            f"× {one.lr_factor:g}",
            "–" if one.weight_decay is None else f"{one.weight_decay:g}",
        )
        for one in made.optimizer
    ]
    screen.table(("match", "parameters", "elements", "lr", "factor", "decay"), rows, right=(1, 2, 3, 4, 5))


def _show_memory(made: Plan) -> None:
    memory = made.memory
    stages = made.pipeline.stages if made.pipeline is not None else ()
    fullest = next((stage for stage, one in enumerate(stages) if one.memory is memory), None)
    screen.heading("Memory of a rank" if fullest is None else f"Memory of a rank of stage {fullest}, which needs most")
    rows = [
        ("parameters", memory.parameters, "exact"),
        ("buffers", memory.buffers, "exact"),
        ("gradients", memory.gradients, "exact"),
        ("unsharded gradients", memory.unsharded, "peak: whole until the step's last micro-batch is reduced"),
        ("optimizer", memory.optimizer, "exact, after its first step"),
        ("activations", memory.activations, "estimate: peak of everything else"),
        ("  logits", memory.logits, "of these"),
        ("peak", memory.peak, "estimate: without the workspaces of kernels and the allocator's reserve"),
    ]
    rows = [row for row in rows if row[0] != "unsharded gradients" or memory.unsharded]
    sizes = format_column([size for _, size, _ in rows])
    screen.table(("", "", ""), [(row[0], size, row[2]) for row, size in zip(rows, sizes, strict=True)], right=(1,))
    for note in memory.notes:
        screen.line(f"  {note}", "yellow")


def _show_communication(made: Plan) -> None:
    screen.heading("Sent by a rank in a step")
    sizes = format_column([int(one.bytes) for one in made.communication])
    rows = [
        (one.kind, f"{one.axis} ({one.ranks})", f"{one.count:,}", size, "across nodes" if one.crosses_nodes else "")
        for one, size in zip(made.communication, sizes, strict=True)
    ]
    screen.table(("", "along", "calls", "bytes", ""), rows, right=(2, 3))
    for axis, least in made.expected_bytes.items():
        sent = sum(one.bytes for one in made.communication if one.axis == axis)
        if least:
            screen.line(
                f"  along {axis}: {format_bytes(sent)}, {sent / least:.3g} × the expected {format_bytes(least)}"
            )


def _show_work(made: Plan) -> None:
    screen.heading("Work")
    if made.flops_per_token is None:
        screen.line("  the model does not declare its FLOPs")
    else:
        screen.line(f"  {format_unit(made.flops_per_token, 'FLOP')} per token, as MFU counts them: {FLOPS_CONVENTION}")
    for name, row in made.items.items():
        size, taken = " × ".join(map(str, row.grid)), f"{row.positions:,} position{'s' * (row.positions != 1)}"
        screen.line(f"  each row is taken to have {row.count:,} × {name} of {size} patches, in {taken} each")
    if made.kernel_flops:
        screen.line(f"  {format_unit(made.kernel_flops, 'FLOP')} in a rank's kernels a step, recomputation included")
    roof = made.roofline
    if roof is None:
        return
    mfu = "" if roof.mfu is None else f", MFU {roof.mfu:.0%}"
    screen.heading(f"At most, on {roof.device}")
    screen.line(f"  {format_count(roof.tokens_per_second)} tokens/s{mfu}, bound by {roof.bound}")
    rows = [
        ("compute", format_seconds(roof.compute), "matrix products and attention, at the peak"),
        ("memory", format_seconds(roof.memory), "products that wait for memory, and the optimizer"),
        ("communication", format_seconds(roof.communication), "if none of it is hidden"),
        (
            "the rest",
            format_seconds(roof.fusible),
            f"unless fused; {format_count(roof.unfused_tokens_per_second)} tokens/s with it",
        ),
    ]
    screen.table(("", "", ""), rows, right=(1,))
    if roof.fits is not None and made.memory.peak is not None:
        verdict = "fits" if roof.fits else "does not fit"
        screen.line(f"  {format_bytes(made.memory.peak)} at the peak {verdict} into {format_bytes(roof.memory_bytes)}")


def _billions(parameters: int) -> str:
    """As models are called: `8.03B`."""
    return format_count(parameters).replace("G", "B")


def _stepped_aside(setup: Setup, request: Request) -> dict[str, str]:
    """Slot → the default that another plugin replaced in it."""
    from forge_train_tools.configuration.request import lay

    defaults = lay(request).below(("defaults",))
    wanted = {key[0]: str(value.value) for key, value in defaults.items() if len(key) == 1}
    return {slot: name for slot, name in wanted.items() if name and slot not in setup.config.defaults}

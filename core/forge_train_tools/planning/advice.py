"""Advice on a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from forge_train.base.format import format_bytes, format_list
from forge_train.registry.discovery import discover
from forge_train_kit.facts import SAVES

if TYPE_CHECKING:
    from forge_train.mesh.axes import Axis

    from . import Memory, Traffic
    from .parameters import Giant
    from .roofline import Device


def warnings(
    crossing: Sequence[str],
    table: Mapping[str, Axis],
    traffic: Sequence[Traffic],
    whole: Sequence[Giant],
    world: int,
    device: Device | None,
    memory: Memory,
) -> Iterator[str]:
    """Sentences for people."""
    for axis in crossing:
        if table[axis].every_layer:
            size = sum(one.bytes for one in traffic if axis in one.axis.split(" × "))
            yield (
                f"{axis} crosses nodes: its collectives, which each layer waits for, send {format_bytes(size)} a step "
                f"over the slow network. Choose parallel.{axis} so that it divides the ranks of a node."
            )
    if whole and world > 1:
        names = format_list(f"{giant.name} ({format_bytes(giant.bytes)})" for giant in whole)
        yield f"Each of the {world} ranks holds the whole of {names}.{_savers('parameters', 'spread parameters')}"
    if device is not None and memory.peak is not None and memory.peak > device.memory:
        yield (
            f"A step takes {format_bytes(memory.peak)} at its peak, and {device.name} has "
            f"{format_bytes(device.memory)}. A smaller train.micro_batch, or more ranks that share a copy of the "
            f"model, need less.{_savers('activations', 'keep fewer activations')}"
        )


def _savers(part: str, how: str) -> str:
    """The installed plugins that make a part of a rank's memory smaller."""
    names = sorted(found.name for found in discover() if part in SAVES.read(found))
    return f" Plugins that {how}: {', '.join(names)}." if names else ""

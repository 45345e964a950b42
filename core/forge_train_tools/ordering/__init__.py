"""The order of all ranks' collectives: rehearsed on a rank of each kind, and compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train.registry.setup import Setup

from ..planning import per_node

if TYPE_CHECKING:
    from .agreement import Fault


@dataclass(frozen=True)
class KindOfRank:
    """Ranks that make the same calls."""

    name: str
    ranks: int
    first: int
    """The lowest of them."""
    calls: int


@dataclass(frozen=True)
class Checked:
    """Result of a check."""

    world: int
    rehearsed: int
    """Ranks that were rehearsed."""
    micro_batches: int
    """Of the step that they rehearsed."""
    classes: tuple[KindOfRank, ...]
    groups: tuple[str, ...]
    """Groups with calls, named by their axes."""
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    """Calls that could not be checked."""


def check_collectives(setup: Setup, *, world: int, nodes: int = 0, folder: Path = Path("runs/plan")) -> Checked:
    """Rehearse ranks of every kind, and compare their collectives and messages.

    A rank's kind is its stage, and whether it is the first, the last or another one along each other axis. Each two of
    these are rehearsed together at least once; code that looks at a rank's number otherwise is not found.

    Args:
        setup: a checked configuration and its plugins.
        world: the number of ranks.
        nodes: over how many nodes they are spread; see `plan`.
        folder: what plugins are told the run folder is; nothing is written there.

    Raises:
        ConfigError: for a composition that can't be.
    """
    from .agreement import Agreement
    from .classes import Classes, Places, words
    from .record import Called
    from .rehearsal import Ranks

    layout = Layout.of(setup.config.parallel, world)
    places = Places(layout)
    ranks = Ranks(setup, layout, World(size=world, local_size=per_node(world, nodes)), folder)
    notes: dict[str, None] = {}

    def calls(rank: int) -> tuple[Called, ...]:
        found = ranks.rehearse(rank)
        notes.update(dict.fromkeys(found.notes))
        return found.calls

    classes = Classes(places, calls)
    found = classes.found()
    used = {str(call.group): None for one in found for call in one.calls if call.group.axes}
    return Checked(
        world=world,
        rehearsed=len(classes.known),
        micro_batches=ranks.micro_batches,
        classes=tuple(
            KindOfRank(words(one.labels, places.stages), one.ranks, one.first, len(one.calls)) for one in found
        ),
        groups=tuple(used),
        faults=tuple(Agreement(places, found).faults()),
        notes=tuple(notes),
    )


__all__ = ["Checked", "KindOfRank", "check_collectives"]

"""The table of mesh axes: the domains that each belongs to, and what happens along it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Domain = Literal["dense", "expert", "batch", "flat"]
EXPERT: Domain = "expert"


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of the meshes. `Layout.size` gives its size.

    A package adds an axis of its own by an entry point of the group `forge_train.axes`, named like the axis. It is
    configured as `parallel.NAME` and nests inside `pp` and outside `dp_replicate`, in every domain.
    """

    name: str
    domains: tuple[Domain, ...] = ()
    """Meshes that have it; for a package's axis, they follow from `splits_data`."""
    configured: bool = True
    """True if it is a key of `[parallel]`; the sizes of other axes are derived."""
    splits_data: bool = False
    """True if ranks along it work on different batches; gradients are then averaged along it."""
    averages: bool = False
    """True if gradients are averaged along it: by SHARD transforms for Forge's own axes, by the transform that covers
    it for a package's. The product of the sizes of these axes is R."""
    divides: Literal["", "layers", "experts"] = ""
    """The parts of the model that ranks along it divide, if any."""
    every_layer: bool = False
    """True if each layer waits for neighbours along it."""
    meaning: str = ""
    """Of a package's axis: one sentence for the configuration file."""


AXES = {
    axis.name: axis
    for axis in (
        Axis("world", ("flat",), configured=False),
        Axis("pp", ("dense", "expert", "batch"), divides="layers"),
        Axis("dp", ("batch",), configured=False),
        Axis("dp_replicate", ("dense", "expert"), splits_data=True, averages=True),
        Axis("dp_shard", ("dense",), splits_data=True, averages=True),
        Axis("efsdp", ("expert",), configured=False),
        Axis("cp", ("dense", "batch"), averages=True, every_layer=True),
        Axis("ep", ("expert",), divides="experts", every_layer=True),
        Axis("tp", ("dense", "batch"), every_layer=True),
        Axis("etp", ("expert",), every_layer=True),
    )
}
"""Forge's axes, outermost first in every domain: ranks are numbered along the innermost."""

CONFIGURED = tuple(axis.name for axis in AXES.values() if axis.configured)


class Table(dict[str, Axis]):
    """Forge's axes and those that packages add to one layout, outermost first."""

    def __init__(self, others: Iterable[Axis] = ()) -> None:
        # Axes that split the data lie beside Forge's own: the batch domain has all of them as one, `dp`.
        added = sorted(others, key=lambda axis: axis.name)
        outside: dict[str, list[Axis]] = {
            "dp": [replace(axis, domains=("dense", "expert", "batch")) for axis in added if not axis.splits_data],
            "dp_replicate": [replace(axis, domains=("dense", "expert")) for axis in added if axis.splits_data],
        }
        for name, axis in AXES.items():
            self.update((one.name, one) for one in (*outside.get(name, ()), axis))

    def domain(self, domain: Domain) -> tuple[str, ...]:
        """The axes of a domain, outermost first."""
        return tuple(axis.name for axis in self.values() if domain in axis.domains)

    @cached_property
    def flattened(self) -> dict[str, tuple[str, ...]]:
        """Axes of the dense domain that are several others in one: parameters are sharded over `fsdp`, gradients
        averaged over `data` (by Forge's SHARD transforms over `dp_cp`), and a loss is added up over `loss`."""
        averaged = tuple(axis.name for axis in self.values() if axis.averages)
        stages = tuple(axis.name for axis in self.values() if axis.divides == "layers")
        dp_cp = tuple(name for name in averaged if name in AXES)
        return {"fsdp": ("dp_shard", "cp"), "data": averaged, "dp_cp": dp_cp, "loss": stages + averaged}


FLATTENED_EXPERT = {"edp": ("dp_replicate", "efsdp")}
"""The same of the expert domain, where experts are spread: the ranks that hold the same experts."""

"""The table of mesh axes: the domains that each belongs to, and what happens along it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Domain = Literal["dense", "expert", "batch", "flat"]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of the meshes. `Layout` has its size under its name."""

    name: str
    domains: tuple[Domain, ...]
    configured: bool = True
    """True if it is a key of `[parallel]`; the sizes of other axes are derived."""
    splits_data: bool = False
    """True if ranks along it work on different batches."""
    averages: bool = False
    """True if SHARD transforms average dense gradients along it. The product of the sizes of these axes is R."""
    every_layer: bool = False
    """True if each layer waits for neighbours along it."""


AXES = {
    axis.name: axis
    for axis in (
        Axis("world", ("flat",), configured=False),
        Axis("pp", ("dense", "expert", "batch")),
        Axis("dp", ("batch",), configured=False),
        Axis("dp_replicate", ("dense", "expert"), splits_data=True, averages=True),
        Axis("dp_shard", ("dense",), splits_data=True, averages=True),
        Axis("efsdp", ("expert",), configured=False),
        Axis("cp", ("dense", "batch"), averages=True, every_layer=True),
        Axis("ep", ("expert",), every_layer=True),
        Axis("tp", ("dense", "batch"), every_layer=True),
        Axis("etp", ("expert",), every_layer=True),
    )
}
"""Outermost first in every domain: ranks are numbered along the innermost."""

CONFIGURED = tuple(axis.name for axis in AXES.values() if axis.configured)


def of_domain(domain: Domain) -> tuple[str, ...]:
    """The axes of a domain, outermost first."""
    return tuple(axis.name for axis in AXES.values() if domain in axis.domains)


FLATTENED = {
    "fsdp": ("dp_shard", "cp"),
    "data": tuple(axis.name for axis in AXES.values() if axis.averages),
    "loss": ("pp", *(axis.name for axis in AXES.values() if axis.averages)),
}
"""Axes of the dense domain that are several others in one: parameters are sharded over `fsdp`, gradients averaged over
`data`, and a loss is added up over `loss`."""

FLATTENED_EXPERT = {"edp": ("dp_replicate", "efsdp")}
"""The same of the expert domain, where experts are spread: the ranks that hold the same experts."""

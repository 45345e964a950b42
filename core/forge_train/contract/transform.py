"""The vocabulary of composition: phases, transforms, and what a transform reports."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..base.errors import PluginError
from .batch import MicroBatch

if TYPE_CHECKING:
    from torch import nn


class Phase(enum.IntEnum):
    """Phase in which a transform is applied; docs/parallelism-order.md gives the reasons. A plugin chooses a phase,
    never a position between phases."""

    PIPELINE = 10
    TENSOR = 20
    CONTEXT = 30
    EXPERT = 40
    ADAPT = 50
    FLOAT8 = 60
    RECOMPUTE = 70
    COMPILE = 80
    SHARD = 90


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of a transform, and the calls that the engine must make for it.

    Only a PIPELINE transform may give several parts in `model`.
    """

    model: nn.Module | list[nn.Module]
    matched: tuple[str, ...] = ()
    """Global names of the modules (or parameters) it changed; matching nothing on every rank is an error."""
    note: str = ""
    """One phrase for `forge plan` and composition.json."""
    added: tuple[str, ...] = field(default=(), kw_only=True)
    """Parameter names that did not exist before."""
    copies: tuple[str, ...] = field(default=(), kw_only=True)
    """Tied parameters that a PIPELINE transform put into another part than the first of their tie. They are no
    parameters of the model: the transform gives them the first's values before each forward pass, and adds their
    gradients to the first's in `after_backward`."""
    expected_bytes: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """Axis of the dense domain (a flattened one too) → bytes that each rank has to send along it in a step, by the
    technique's formula; `forge plan` shows them beside the bytes that it counts."""
    on_micro_batch: Callable[[MicroBatch], None] | None = field(default=None, kw_only=True)
    """Called before each micro-batch that passes through this part; switches gradient synchronisation."""
    after_backward: Callable[[], None] | None = field(default=None, kw_only=True)
    """Called once a step, after the last backward and before the gradient norm; the last transform's first."""
    free_gathered: Callable[[], None] | None = field(default=None, kw_only=True)
    """Called after a forward without backward: drops gathered copies of weights, which would be stale next step."""


@dataclass(frozen=True, slots=True)
class Transform:
    """One technique's change of the model, at its place in the mandated order."""

    phase: Phase
    slot: str
    """Exclusive name of the transform: two enabled transforms for one slot are an error."""
    apply: Callable[[nn.Module], Applied]
    after: tuple[str, ...] = ()
    """Slots of the same phase that go first."""
    requires: tuple[str, ...] = ()
    """Slots that must be there too."""
    conflicts: tuple[str, ...] = ()
    """Slots that can't be there too."""
    covers: tuple[str, ...] = ()
    """Mesh axes this transform makes real (`tp`, `dp_shard`, …), and `precision`."""
    fallback: bool = False
    """Left out where others cover all that it covers."""

    def __post_init__(self) -> None:
        if not isinstance(self.phase, Phase):
            raise PluginError(f"Transform {self.slot!r}: expected a Phase, found {self.phase!r}.")

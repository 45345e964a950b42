"""Parameters of each stage entry on one rank, by the shapes that transforms gave them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from forge_train.mesh.tensors import local

from ..planning.alike import Pattern
from .candidates import LAYERS

REST = "rest"


@dataclass(frozen=True)
class Tensors:
    """Parameters of some modules on a rank, before data parallelism shards them."""

    shapes: tuple[tuple[int, int, bool, bool], ...]
    """Of each parameter: rows, bytes, whether it belongs to experts, whether it is trained."""

    @cached_property
    def bytes(self) -> int:
        return sum(size for _, size, _, _ in self.shapes)

    def sharded(self, shards: int, expert_shards: int) -> float:
        """Bytes of the first rank's shards: rows are dealt in runs of equal length, the last one may be shorter."""
        total = 0.0
        for rows, size, expert, _ in self.shapes:
            count = expert_shards if expert else shards
            total += size if not rows else size / rows * -(-rows // count)
        return total


@dataclass(frozen=True)
class Weights:
    """Parameters of the whole model on a rank, by entry of its `stages`."""

    entries: tuple[Tensors, ...]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


def entries_of(part: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The modules of each entry of a pipeline; of a model that can't be cut, its units and the rest."""
    try:
        stages = tuple(getattr(part, "stages", ()))
    except TypeError:  # a model's word for why it can't be cut
        stages = ()
    return stages or (*((name,) for name in getattr(part, "units", ())), (REST,))


def weights_of(
    short: nn.Module, entries: Sequence[tuple[str, ...]], units: Sequence[str], pattern: Pattern | None
) -> Weights:
    """Read a short model, of which left-out repetitions are like the first.

    Args:
        short: composed; how data parallelism shards it does not count.
        entries: of the whole model.
        units: of the whole model, in order.
        pattern: of its repetitions.
    """
    stands_for = _representatives(units, pattern)
    named = dict(short.named_parameters())
    experts = tuple(f"{name}." for name, module in short.named_modules() if getattr(module, "domain", "") == "expert")
    owned: dict[str, list[tuple[int, int, bool, bool]]] = {}
    names = sorted({stands_for.get(name, name) for entry in entries for name in entry}, key=len, reverse=True)
    for name, parameter in named.items():
        home = next((one for one in names if name.startswith(f"{one}.") or name == one), REST)
        shape = _before_sharding(parameter)
        size = math.prod(shape) * local(parameter).element_size()
        owned.setdefault(home, []).append(
            (shape[0] if shape else 0, size, name.startswith(experts), parameter.requires_grad)
        )
    made: Mapping[str, Tensors] = {name: Tensors(tuple(shapes)) for name, shapes in owned.items()}
    empty = Tensors(())
    return Weights(
        tuple(
            Tensors(tuple(one for name in entry for one in made.get(stands_for.get(name, name), empty).shapes))
            for entry in entries
        )
    )


def _before_sharding(parameter: Tensor) -> list[int]:
    """Shape of a parameter on the first rank, as the axes leave it that divide layers."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for at, (axis, placement) in enumerate(zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)):
            if axis in LAYERS and isinstance(placement, Shard):
                shape[placement.dim] = -(-shape[placement.dim] // mesh.size(at))
    return shape


def _representatives(units: Sequence[str], pattern: Pattern | None) -> dict[str, str]:
    """Unit that a short model may lack → the one that it is like."""
    if pattern is None:
        return {}
    last = pattern.first + pattern.size * pattern.times
    return {units[at]: units[pattern.first + (at - pattern.first) % pattern.size] for at in range(pattern.first, last)}


def repetitions(entries: Sequence[tuple[str, ...]], units: Sequence[str], pattern: Pattern | None) -> list[float]:
    """Repetitions of the pattern in each entry, as a share where one has several units."""
    if pattern is None:
        return [1.0 / len(entries)] * len(entries)
    inside = set(units[pattern.first : pattern.first + pattern.size * pattern.times])
    return [math.fsum(name in inside for name in entry) / pattern.size for entry in entries]

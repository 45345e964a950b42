"""Parameters that are whole on every rank, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forge_train import ConfigError

from .plan import Entry


@dataclass(frozen=True)
class Whole:
    """A parameter that every rank has whole."""

    name: str
    partial: bool
    """Whether a rank's gradient is a part of a sum: it has seen some of the tokens, or some of the heads."""
    planned: bool


def whole_parameters(
    part: nn.Module, entries: Sequence[Entry], *, sequence_parallel: bool, experts_apart: bool = False
) -> list[Whole]:
    """The parameters that the plan did not split, without those of experts that are spread later.

    Under sequence parallelism every rank sees some of the tokens, outside of blocks, or computes a part of a sum,
    within them, so that every gradient is partial. Without, that holds within blocks only, save for what is added to
    the sum.
    """
    styles = {entry.name: entry.style for entry in entries}
    blocks = [entry.name for entry in entries if entry.style == "gather"]
    replicated_head = "logits" not in styles.values()
    experts = [name for name, module in part.named_modules() if getattr(module, "domain", "") == "expert"]
    found = []
    for name, parameter in part.named_parameters():
        if isinstance(parameter, DTensor) or (experts_apart and _within(name, experts)):
            continue
        owner = name.rpartition(".")[0]
        style = next((styles[path] for path in _around(owner) if path in styles and styles[path] != "gather"), None)
        if sequence_parallel:
            partial = not (replicated_head and _within(owner, ["head"]))
        else:
            partial = style in ("heads", "tokens", "summed") or (style != "rowwise" and _within(owner, blocks))
        found.append(Whole(name, partial, style is not None))
    return found


def _around(path: str) -> Iterable[str]:
    """The path itself and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _within(path: str, outer: Sequence[str]) -> bool:
    return any(path == one or path.startswith(f"{one}.") for one in outer)


class Replicas:
    """Sums the partial gradients of whole parameters over the ranks, once a step and in one collective.

    Where the plan is silent about a parameter its gradient is judged by where the parameter lies, and the first step
    shows whether that was right: a gradient that should be partial and is the same on all ranks, or the reverse, is an
    error, since summing one that is whole multiplies it by the number of ranks without a sound.
    """

    def __init__(self, part: nn.Module, wholes: Sequence[Whole], mesh: DeviceMesh) -> None:
        self._part, self._wholes, self._mesh = part, wholes, mesh
        self._found: list[tuple[Whole, nn.Parameter]] | None = None
        self._judged = False

    def look_up(self, last: bool) -> None:
        """Before the first forward: later on a SHARD transform may show other parameters than the optimizer has."""
        if self._found is None:
            ours = {whole.name: whole for whole in self._wholes}
            self._found = [(ours[name], parameter) for name, parameter in self._part.named_parameters() if name in ours]

    def reduce(self) -> None:
        """Finish the step's gradients."""
        self.look_up(last=True)
        pairs = [(whole, _local(p.grad)) for whole, p in self._found or () if p.grad is not None]
        if not self._judged:
            self._judged = True
            self._judge([(whole, gradient) for whole, gradient in pairs if not whole.planned])
        by_dtype: dict[Any, list[Tensor]] = {}
        for whole, gradient in pairs:
            if whole.partial and gradient.numel():
                by_dtype.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=self._mesh.get_group())
            pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(pieces, gradients, strict=True)])

    def _judge(self, pairs: Sequence[tuple[Whole, Tensor]]) -> None:
        """Raises ConfigError for a gradient that is not what the parameter's place lets expect."""
        if not pairs:
            return
        mine = torch.stack([gradient.double().abs().sum() for _, gradient in pairs])
        everybody = [torch.empty_like(mine) for _ in range(self._mesh.size())]
        dist.all_gather(everybody, mine, group=self._mesh.get_group())
        table = torch.stack(everybody)
        low, high = table.amin(0), table.amax(0)
        same, apart = (low == high) & (high > 0), high - low > 1e-3 * high
        for (whole, _), is_same, is_apart in zip(pairs, same.tolist(), apart.tolist(), strict=True):
            if whole.partial and is_same:
                raise ConfigError(
                    f"tensor_plan() does not name {whole.name!r}, and each of the {self._mesh.size()} ranks computes "
                    "its whole gradient, where a part of a sum was to be expected; have the plan say how its module is "
                    "split, or set tp.sequence_parallel = false."
                )
            if not whole.partial and is_apart:
                raise ConfigError(
                    f"tensor_plan() does not name {whole.name!r}, and its gradient differs between the "
                    f"{self._mesh.size()} ranks; have the plan say how its module is split ('heads', where each rank "
                    "has some of what it works on)."
                )


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient

"""Parameters that are whole on every rank, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forge_train import ConfigError, MicroBatch
from forge_train.mesh.tensors import local

from .plan import Entry


@dataclass(frozen=True)
class Whole:
    """A parameter that every rank has whole."""

    name: str
    partial: bool
    """True if each rank has part of the gradient, to be summed: it has seen some of the tokens or heads."""
    planned: bool
    """True if the plan or the module itself declares it; otherwise the first gradients decide."""
    added: bool = False
    """True if a transform after tensor parallelism added it."""


DECLARED = "partial_gradients"
"""Attribute by which an added module says whether a rank's gradients of its parameters are parts of a sum."""
JUDGED_STEPS = 10
"""Steps in which gradients that no plan speaks of are looked at, until they are not zero."""


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
            partial = style in ("heads", "tokens", "summed", "partial") or (
                style != "rowwise" and _within(owner, blocks)
            )
        found.append(Whole(name, partial, style is not None))
    return found


def added_parameter(
    part: nn.Module, entries: Sequence[Entry], name: str, *, sequence_parallel: bool, experts_apart: bool = False
) -> Whole | None:
    """A parameter that a transform added after the plan was realised; None leaves its gradient alone.

    It works beside split weights (in a block, or in a module that is split itself) on a part of a sum: of features, of
    rows, or of tokens. The nearest module around it that has `partial_gradients` decides instead.
    """
    styles = {entry.name: entry.style for entry in entries}
    modules = dict(part.named_modules())
    owners = [path for path in _around(name.rpartition(".")[0]) if path in modules]
    if experts_apart and any(getattr(modules[path], "domain", "") == "expert" for path in owners):
        return None
    declared = next((getattr(modules[path], DECLARED) for path in owners if hasattr(modules[path], DECLARED)), None)
    if declared is not None:
        return Whole(name, bool(declared), planned=True, added=True)
    if sequence_parallel:
        replicated_head = "logits" not in styles.values()
        return Whole(name, not (replicated_head and _within(name, ["head"])), planned=False, added=True)
    split = any(styles.get(path, "sequence") != "sequence" for path in owners)
    return Whole(name, split, planned=False, added=True)


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

    def __init__(
        self,
        part: nn.Module,
        wholes: Sequence[Whole],
        mesh: DeviceMesh,
        added: Callable[[str], Whole | None] = lambda name: None,
    ) -> None:
        """
        Args:
            part: the module whose gradients are finished.
            wholes: its whole parameters, once the plan is realised.
            mesh: of the axis tp.
            added: what to make of a parameter that a later transform adds; None leaves its gradient alone.
        """
        self._part, self._wholes, self._mesh, self._added = part, wholes, mesh, added
        self._before = {name for name, _ in part.named_parameters()}
        self._found: list[tuple[Whole, nn.Parameter]] | None = None
        self._unjudged: set[str] | None = None
        self._judgements = JUDGED_STEPS

    def look_up(self, micro: MicroBatch | None = None) -> None:
        """Before the first forward: later on a SHARD transform may show other parameters than the optimizer has."""
        if self._found is not None:
            return
        ours: dict[str, Whole | None] = {whole.name: whole for whole in self._wholes}
        self._found = []
        for name, parameter in self._part.named_parameters():
            new = name not in self._before and not self._is_split(parameter)
            if (whole := self._added(name) if new else ours.get(name)) is not None:
                self._found.append((whole, parameter))

    def _is_split(self, parameter: nn.Parameter) -> bool:
        """Return True for a DTensor over the axis; its author places its gradient."""
        axes = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
        return bool(set(self._mesh.mesh_dim_names or ()) & set(axes or ()))

    def reduce(self) -> None:
        """Finish the step's gradients."""
        self.look_up()
        pairs = [(whole, local(p.grad)) for whole, p in self._found or () if p.grad is not None]
        if self._judgements:
            self._judgements -= 1
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
        """Raises ConfigError for a gradient that is not what the parameter's place lets expect. One that is zero says
        nothing yet: the first factor of a low-rank update has none before the second has moved."""
        if self._unjudged is None:
            self._unjudged = {whole.name for whole, _ in pairs}
        pairs = [(whole, gradient) for whole, gradient in pairs if whole.name in self._unjudged]
        if not pairs:
            return
        mine = torch.stack([gradient.double().abs().sum() for _, gradient in pairs])
        everybody = [torch.empty_like(mine) for _ in range(self._mesh.size())]
        dist.all_gather(everybody, mine, group=self._mesh.get_group())
        table = torch.stack(everybody)
        low, high = table.amin(0), table.amax(0)
        same, apart = (low == high) & (high > 0), high - low > 1e-3 * high
        for (whole, _), is_same, is_apart, is_zero in zip(
            pairs, same.tolist(), apart.tolist(), (high == 0).tolist(), strict=True
        ):
            if not is_zero:
                self._unjudged.discard(whole.name)
            if whole.added and (is_same if whole.partial else is_apart):
                found = "is the same on" if is_same else "differs between"
                raise ConfigError(
                    f"{whole.name!r} was added to the model, and its gradient {found} the {self._mesh.size()} ranks, "
                    "which is not what its place in tensor_plan() suggests. Declare it on its module: "
                    f"partial_gradients = {not whole.partial}."
                )
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

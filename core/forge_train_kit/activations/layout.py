"""The part of an activation that a rank holds: rows, positions and features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forge_train.base.errors import ConfigError
from forge_train.contract.batch import Batch
from forge_train.contract.model import Model
from forge_train.mesh.tensors import full_tensor, local
from forge_train.plugin.job import Job

from ..model import TensorStyle
from .modules import named_modules

Kind = Literal["tokens", "rows", "micro_batch"]
"""`tokens`: values are `[rows, tokens, …]`; `rows`: `[rows, …]`; `micro_batch`: one value for all rows together."""
Side = Literal["output", "input"]
BLOCKS = ("gather", "summed", "tokens")
"""Styles of modules in which ranks may work on different heads, features or tokens."""


@dataclass(frozen=True)
class Piece:
    """A rank's part of an activation, for one micro-batch."""

    values: Tensor
    kind: Kind
    samples: Tensor
    """The number of each row's sequence in the stream of the data, `[rows]` int64; for a value of a whole micro-batch,
    the first of them, `[1]`."""
    positions: Tensor | None
    """Position of each token within its whole row, `[tokens]` int64; None unless there are tokens."""
    length: int
    """Tokens of whole rows."""
    split: int | None = None
    """The axis along which ranks of a group hold different pieces, if there is one."""
    certain: bool = True
    """False if only the values show whether they are split: equal on all ranks of the group, they are not."""
    part: tuple[int, int] = (0, 1)
    """Index of this rank in that group, and number of its ranks."""
    added: bool = False
    """True if pieces of one row are to be added up, and not put next to each other."""


class Layouts:
    """Knows which part of its activations a rank holds.

    Tensor parallelism is read from the model's `tensor_plan()`, context parallelism from the micro-batch. Every rank
    makes one.

    Args:
        model: composed.
        job: its job.
    """

    def __init__(self, model: Model, job: Job) -> None:
        self._job = job
        self.tp, self.cp = job.dist.layout.tp, job.dist.layout.cp
        self.tp_rank = job.dist.mesh("dense", "tp").get_local_rank() if self.tp > 1 else 0
        self.cp_rank = job.dist.mesh("dense", "cp").get_local_rank() if self.cp > 1 else 0
        self._styles: dict[str, TensorStyle] = {}
        if self.tp * self.cp > 1:
            for part in model.parts:
                self._styles |= _plan(part)
        self._modules = {"": model.parts[0], **named_modules(model)}
        self._experts = {name for name, one in self._modules.items() if getattr(one, "domain", "") == "expert"}
        self._heads = {id(one) for part in model.parts for one in _modules(getattr(part, "head", None))}

    def by_routing(self, name: str) -> bool:
        """Return True for experts, and what is inside of them: their rows are those that a router has sent."""
        return any(path in self._experts for path in _around(name))

    def is_some_tokens(self, name: str, x: Tensor, batch: Batch) -> bool:
        """Return True for what the head gave for some of a rank's tokens: losses call it with one chunk after the
        other."""
        rows, tokens = batch.inputs.shape[:2]
        return id(self._modules[name]) in self._heads and x.ndim > 2 and len(x) == rows and x.shape[1] < tokens

    def piece(self, name: str, x: Tensor, batch: Batch, *, side: Side = "output", start: int = 0) -> Piece:
        """The part that this rank holds of an activation, without communication.

        Args:
            name: of the module.
            x: what it gave, or was given.
            batch: the micro-batch.
            side: which of the two it is.
            start: number of this rank's tokens before the first of `x`, for a head.
        """
        dim, certain = self._split(name, x, side)
        x = _local(x)
        samples = batch.sample_ids if batch.sample_ids is not None else torch.arange(len(batch.inputs))
        samples, part = samples.cpu(), (self.tp_rank, self.tp)
        length = batch.inputs.shape[1] * (1 if batch.positions is None else self.cp)
        if self.cp > 1 and x.shape[:2] == (len(batch.inputs), length):  # whole sequences of some heads
            both, axis = (self.tp_rank * self.cp + self.cp_rank, self.tp * self.cp), 2 if x.ndim > 2 else None
            return Piece(x, "tokens", samples, torch.arange(length), length, axis, part=both)
        if (found := self._tokens(name, x, batch, start)) is not None:
            values, positions, shift = found
            axis = None if dim is None or shift is None or dim + shift < 2 else dim + shift
            return Piece(values, "tokens", samples, positions, length, axis, certain, part)
        if self.cp > 1 and self._styles.get(name) == "channels":
            dim, part = 2, (self.tp_rank * self.cp + self.cp_rank, self.tp * self.cp)
        if x.ndim and len(x) == len(batch.inputs):
            return Piece(x, "rows", samples, None, length, dim, certain, part)
        axis = None if dim is None else dim + 1
        return Piece(x[None], "micro_batch", samples[:1], None, length, axis, certain, part)

    def full(
        self, name: str, x: Tensor, batch: Batch, side: Side = "output"
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """An activation with all features of all tokens that this rank's group holds, and the way back from there.

        The ranks of tensor parallelism must call it together. No gradients pass.

        Raises:
            ConfigError: if ranks of context parallelism hold different heads of it.
        """
        dim, certain = self._split(name, x, side)
        if (shards := getattr(x, "placements", None)) is not None:
            return full_tensor(x), partial(_sharded, x, shards)
        rows, tokens = batch.inputs.shape[:2]
        if self.cp > 1 and x.shape[:2] == (rows, tokens * self.cp):
            raise ConfigError(f"{name!r} has whole sequences of some heads on each rank, and can't be changed there.")
        each = -(-tokens // self.tp)
        if self.tp > 1 and each < tokens and x.shape[:2] == (rows, each):
            whole = torch.cat(self._job.dist.gather_tensors(x.contiguous(), "tp"), 1)[:, :tokens]
            return whole, partial(_own_tokens, rank=self.tp_rank, each=each)
        if dim is None:
            return x, _same
        parts = self._job.dist.gather_tensors(x.contiguous(), "tp")
        if not certain and all(torch.equal(one, parts[0]) for one in parts):
            return x, _same
        start = sum(one.shape[dim] for one in parts[: self.tp_rank])
        return torch.cat(parts, dim), partial(torch.narrow, dim=dim, start=start, length=x.shape[dim])

    def _tokens(self, name: str, x: Tensor, batch: Batch, start: int) -> tuple[Tensor, Tensor, int | None] | None:
        """`[rows, tokens, …]`, the positions, and how many axes were added in front of the features, None where ranks
        divide the tokens and not the features; None if there are no tokens."""
        rows, tokens = batch.inputs.shape[:2]
        places = torch.arange(tokens) if batch.positions is None else batch.positions.cpu()
        each = -(-tokens // self.tp)
        own = places[self.tp_rank * each : (self.tp_rank + 1) * each]
        shape, added = tuple(x.shape[:2]), 0
        if self.is_some_tokens(name, x, batch):
            return x, places[start : start + shape[1]], 0
        if shape == (1, tokens):  # tables of positions, the same for all rows
            x = x.expand(rows, *x.shape[1:])
        elif shape not in ((rows, tokens), (rows, each)):
            if not x.ndim or len(x) not in (rows * tokens, rows * each):
                return None
            x, added = torch.unflatten(x, 0, (rows, -1)), 1
        return (x, places, added) if x.shape[1] == tokens else (x[:, : len(own)], own, None)

    def _split(self, name: str, x: Tensor, side: Side) -> tuple[int | None, bool]:
        """The axis along which ranks of tensor parallelism hold different pieces, and whether that is certain."""
        last, style = x.ndim - 1, self._styles.get(name)
        heads = 2 if x.ndim > 3 else last
        if self.tp == 1:
            return None, True
        if (placed := _placed(x)) is not None:
            return placed, True
        if side == "input":
            return (last, True) if style in ("rowwise", "partial") else (heads, False)
        if style is not None:
            own = x.ndim > 3 or (x.ndim == 1 and hasattr(self._modules[name], "heads_piece"))
            split = {"colwise": last, "features": last, "channels": min(2, last), "heads": heads if own else None}
            return split.get(style), True
        if _rows_split(self._modules[name], x.shape[-1] if x.ndim else 0):
            return last, True
        inside = any(self._styles.get(path) in BLOCKS for path in _around(name))
        return (heads, False) if inside else (None, True)


def _same(x: Tensor) -> Tensor:
    return x


def _own_tokens(x: Tensor, rank: int, each: int) -> Tensor:
    """A rank's piece of the tokens; zeros fill up the last one."""
    own = x[:, rank * each : (rank + 1) * each]
    filler = own.new_zeros(own.shape[0], each - own.shape[1], *own.shape[2:])
    return torch.cat([own, filler], 1)


def _sharded(like: Any, placements: Any, x: Tensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, like.device_mesh, placements)


def _plan(part: nn.Module) -> Mapping[str, TensorStyle]:
    declare = getattr(part, "tensor_plan", None)
    try:
        plan: Mapping[str, TensorStyle] = declare() if declare else {}
    except TypeError:  # without a plan, tensor parallelism refuses the model, and no other layout needs one
        return {}
    return plan


def _modules(module: nn.Module | None) -> Iterator[nn.Module]:
    return iter(()) if module is None else module.modules()


def _around(path: str) -> Iterator[str]:
    """The path itself and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _placed(x: Any) -> int | None:
    """The axis along which a DTensor is split; None for other tensors."""
    placements = getattr(x, "placements", ())
    return next((one.dim for one in placements if one.is_shard()), None)


def _local(x: Tensor) -> Tensor:
    held: Tensor = full_tensor(x) if any(one.is_partial() for one in getattr(x, "placements", ())) else local(x)
    return held


def _rows_split(module: nn.Module, features: int) -> bool:
    """Return True if a linear gives some of its output features, as those that transforms add may."""
    weight = module._parameters.get("weight")
    names = getattr(getattr(weight, "device_mesh", None), "mesh_dim_names", None) or ()
    places = getattr(weight, "placements", ())
    split = any(name == "tp" and place.is_shard(0) for name, place in zip(names, places, strict=True))
    return split and weight is not None and weight.shape[0] != features

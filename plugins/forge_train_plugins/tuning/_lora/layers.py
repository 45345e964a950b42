"""Modules with low-rank updates, as classes over their own: hooks, names and the module's own product stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from forge_train import Init
from forge_train.mesh.tensors import local
from forge_train_kit.model import Dropout
from forge_train_kit.specialisation import Specialisation

from .targets import MAGNITUDE, Target

_ops = torch.ops._c10d_functional
Read = Callable[[str], Tensor]
"""Reads the first values of a factor, `A` or `B`, or of the `magnitude`."""


class Adapted(nn.Module):
    """A module with updates."""

    updates_on = True
    lora_initial: Mapping[str, Init]
    """Parameter → its initial values."""
    lora_scales: Mapping[str, float]
    """Weight → the scale of its update."""
    lr_factors: dict[str, float]

    def updates_are_zero(self) -> bool:
        """Return True if a factor of each update is zero, and magnitudes are lengths of rows."""
        moves = {name: bool(local(self.get_parameter(name)).any()) for name in self.lora_initial}
        pairs = [(name, f"{name[:-1]}B") for name in moves if name.endswith("A")]
        return not moves.get(MAGNITUDE) and not any(moves[a] and moves[b] for a, b in pairs)

    def initial(self, name: str) -> Init | None:
        if name in self.lora_initial:
            return self.lora_initial[name]
        found: Init | None = getattr(super(), "initial", lambda _: None)(name)
        return found


class LowRank(Adapted):
    """`W x + scale · B A x`."""

    lora_A: nn.Parameter  # noqa: N815  # as in the paper, and in PEFT's files
    lora_B: nn.Parameter  # noqa: N815  # the same
    lora_dropout: Dropout | None

    def forward(self, x: Tensor) -> Tensor:
        if not self.updates_on:
            own: Tensor = super().forward(x)
            return own
        taken = x if self.lora_dropout is None else self.lora_dropout(x)
        narrow = F.linear(taken, local(self.lora_A)) * self.lora_scales["weight"]
        out: Tensor = super().forward(x)
        return out + F.linear(narrow, local(self.lora_B))


class Dora(LowRank):
    """`m / |W + scale · B A| · (W + scale · B A) x` (DoRA, arXiv:2402.09353, eq. 5): `m` and the lengths are of rows,
    and the lengths get no gradient (section 4.3). The parameter is `m`, if that is given, or what `m` has gained over
    `|W|`, which begins at 0."""

    lora_magnitude: nn.Parameter
    lora_is_given: bool
    lora_adds_bias: bool
    lora_group: str
    """The group of ranks that have some columns of each row; empty if a rank has all of them."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        if not self.updates_on:
            return out
        before, now = self._lengths()
        own = local(self.lora_magnitude)
        stretch: Tensor = ((own if self.lora_is_given else before + own) / now).to(out.dtype)
        if not self.lora_adds_bias:
            return out * stretch
        bias: Tensor = local(self.bias)
        return (out - bias) * stretch + bias

    @torch.no_grad()
    def _lengths(self) -> tuple[Tensor, Tensor]:
        """Of the rows of `W` and of `W + scale · B A`, `[out]` each."""
        weight, a, b = (local(one).float() for one in (self.weight, self.lora_A, self.lora_B))
        moved = torch.addmm(weight, b, a, alpha=self.lora_scales["weight"])
        squares = torch.stack([weight.square().sum(1), moved.square().sum(1)])
        if self.lora_group:
            squares = _ops.wait_tensor(_ops.all_reduce(squares, "sum", self.lora_group))
        before, now = lengths(squares)
        return before, now


def lengths(squares: Tensor) -> Tensor:
    """Their roots; a row of zeros has the smallest length that can divide."""
    return squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt()


class LowRankTable(Adapted):
    """Rows of `W + scale · (B A)ᵀ`."""

    lora_embedding_A: nn.Parameter  # noqa: N815  # as in PEFT's files
    lora_embedding_B: nn.Parameter  # noqa: N815  # the same

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = super().forward(ids)
        if not self.updates_on:
            return out
        # The module's own look-up, with its padding, its scale and its share of the rows.
        narrow = _standing_in(self, {"weight": local(self.lora_embedding_A).t()})
        found: Tensor = super(LowRankTable, narrow).forward(ids)
        return out + F.linear(found * self.lora_scales["weight"], local(self.lora_embedding_B))


class LowRankStacks(Adapted):
    """Experts with an update of each of some stacks, `W[e] + scale · B[e] A[e]`."""

    lora_product: Any
    """The product of rows and a stack, if the experts compute by one that can be replaced; else weights are updated
    before the forward."""

    def forward(self, *args: Any) -> Tensor:
        if not self.updates_on:
            own: Tensor = super().forward(*args)
            return own
        held = {name: local(one) for name, one in self._parameters.items()}
        updates = {
            key: (held[f"{key}_lora_A"], held[f"{key}_lora_B"], scale) for key, scale in self.lora_scales.items()
        }
        changed: dict[str, Any] = {}
        if self.lora_product is None:
            for key, (a, b, scale) in updates.items():
                held[key] = torch.baddbmm(held[key], b, a, alpha=scale)
        else:
            changed["product"] = self._product({id(held[key]): update for key, update in updates.items()})
        found: Tensor = super(LowRankStacks, _standing_in(self, held, **changed)).forward(*args)
        return found

    def _product(self, updates: Mapping[int, tuple[Tensor, Tensor, float]]) -> Any:
        own: Any = self.product
        narrow = self.lora_product

        def product(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
            out: Tensor = own(rows, weight, sizes)
            if id(weight) not in updates:
                return out
            a, b, scale = updates[id(weight)]
            found: Tensor = narrow(narrow(rows, a, sizes) * scale, b, sizes)
            return out + found

        return product


def _standing_in(module: nn.Module, parameters: Mapping[str, Tensor], **changed: Any) -> Any:
    """A module of the same class and state, with other tensors as its parameters."""
    other = object.__new__(type(module))
    vars(other).update(vars(module) | {"_parameters": dict(parameters)} | changed)
    return other


class Replaceable(nn.Linear):
    """A linear whose product another plugin may replace, as in tensor parallelism."""

    product = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


_replaceable = Specialisation(lambda _: Replaceable)
_low_rank = Specialisation(lambda _: LowRank)
_dora = Specialisation(lambda _: Dora)
_table = Specialisation(lambda _: LowRankTable)
_stacks = Specialisation(lambda _: LowRankStacks)


def adapt(
    target: Target,
    rank: int,
    scale: float,
    *,
    dropout: Dropout | None = None,
    lr_ratio: float = 1.0,
    read: Read | None = None,
    dora: bool = False,
) -> None:
    """Give a weight its update, on the meta device. A factor that shares an axis along which the weight is split is
    split like it."""
    module, weight = target.module, target.weight
    if target.is_stack:
        _adapt_stack(target, rank)
    elif target.is_embedding:
        rows, columns = weight.shape
        module.lora_embedding_A = nn.Parameter(_empty((rank, rows), weight, {0: 1}))
        module.lora_embedding_B = nn.Parameter(_empty((columns, rank), weight, {1: 0}))
        _table(module)
    else:
        (rows, columns), split = weight.shape, split_axis(weight)
        module.lora_A = nn.Parameter(_empty((rank, columns), weight, {1: 1}))
        module.lora_B = nn.Parameter(_empty((rows, rank), weight, {0: 0}))
        module.lora_dropout = dropout
        if dropout is not None and split == 1:
            mesh = _mesh(weight)
            dropout.features_piece = (mesh.get_local_rank(), mesh.size())
        if type(module).forward is nn.Linear.forward:
            _replaceable(module)
        if dora:
            module.lora_magnitude = nn.Parameter(_empty((rows,), weight, {0: 0}))
            module.lora_is_given = read is not None
            module.lora_adds_bias = module.bias is not None and split != 1  # else it is added to the sum over the ranks
            module.lora_group = _mesh(weight).get_group().group_name if split == 1 else ""
        (_dora if dora else _low_rank)(module)
    _declare(target, scale, lr_ratio, read)


def _adapt_stack(target: Target, rank: int) -> None:
    module, weight = target.module, target.weight
    experts, rows, columns = weight.shape
    a, b = target.factors
    setattr(module, a, nn.Parameter(_empty((experts, rank, columns), weight, {0: 0, 2: 2})))
    setattr(module, b, nn.Parameter(_empty((experts, rows, rank), weight, {0: 0, 1: 1})))
    if not isinstance(module, LowRankStacks):
        module.lora_product = getattr(module, "product", None)
        _stacks(module)


def _declare(target: Target, scale: float, lr_ratio: float, read: Read | None) -> None:
    """Say how the factors begin, as PEFT draws them, and what their learning rates are."""
    module, (a, b) = target.module, target.factors
    if read is not None:
        starts = {name: Init("given", values=_reading(read, name[-1])) for name in (a, b)}
    elif target.is_embedding:
        starts = {a: Init("zeros"), b: Init("normal", 1.0)}
    else:  # uniform within ± 1/√in
        starts = {a: Init("uniform", 1 / math.sqrt(3 * target.weight.shape[-1])), b: Init("zeros")}
    if isinstance(module, Dora):
        starts[MAGNITUDE] = Init("zeros") if read is None else Init("given", values=_reading(read, "magnitude"))
    module.lora_initial = {**getattr(module, "lora_initial", {}), **starts}
    module.lora_scales = {**getattr(module, "lora_scales", {}), target.key: scale}
    module.lr_factors = {**getattr(module, "lr_factors", {}), **({} if target.is_embedding else {b: lr_ratio})}


def _reading(read: Read, factor: str) -> Callable[[int], Tensor]:
    return lambda _: read(factor)


def _mesh(weight: Any) -> Any:
    return weight.device_mesh


def split_axis(weight: Tensor) -> int | None:
    """The axis along which tensor parallelism has split a weight."""
    places = weight.placements if isinstance(weight, DTensor) else ()
    return next((place.dim for place in places if isinstance(place, Shard)), None)


def _empty(shape: tuple[int, ...], weight: Any, shared: Mapping[int, int]) -> Tensor:
    """A factor on the meta device.

    Args:
        shape: of the whole factor.
        weight: what it updates.
        shared: axis of the weight → the factor's axis of the same meaning.
    """
    whole = torch.empty(shape, device="meta")
    if not isinstance(weight, DTensor):
        return whole
    places = [
        Shard(shared[one.dim]) if isinstance(one, Shard) and one.dim in shared else Replicate()
        for one in weight.placements
    ]
    if weight.ndim == 2 and all(isinstance(one, Replicate) for one in places):
        return whole  # whole parameters are for tensor parallelism to look after
    return distribute_tensor(whole, weight.device_mesh, places, src_data_rank=None)

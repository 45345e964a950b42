"""Modules with low-rank updates, as classes over their own: hooks, names and the module's own product stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Init
from forge_train.mesh.tensors import local
from forge_train_kit.model import Dropout
from forge_train_kit.specialisation import Specialisation

from .factors import empty, factors, mesh_of, split_axis
from .fixed import START, Fixed, Read
from .targets import MAGNITUDE, WEIGHT, Target

_ops = torch.ops._c10d_functional


class Adapted(nn.Module):
    """A module with updates. Some are fixed: those of adapters beneath, and what its own began with (PiSSA)."""

    updates_on = True
    lora_fixed: Mapping[str, tuple[tuple[str, str, float], ...]]
    """Weight → names of both factors of each fixed update, and its scale."""
    lora_initial: Mapping[str, Init]
    """Parameter → its initial values."""
    lora_scales: Mapping[str, float]
    """Weight → the scale of its update."""
    lr_factors: dict[str, float]

    def is_update(self, name: str) -> bool:
        """Return True for a factor, and for a magnitude."""
        return name in self.lora_initial

    def updates_are_zero(self) -> bool:
        """Return True if a factor of each update is zero, and magnitudes are lengths of rows."""
        held = {name: local(one) for name, one in self._parameters.items() if name in self.lora_initial}
        if MAGNITUDE in held and held[MAGNITUDE].any():
            return False
        for a, b in ((name, f"{name[:-1]}B") for name in held if name.endswith("A")):
            first = [held.get(f"{name}_{START}") for name in (a, b)]
            if any(
                one is not None and not torch.equal(held[name], one) for name, one in zip((a, b), first, strict=True)
            ):
                return False
            if first[0] is None and held[a].any() and held[b].any():
                return False
        return True

    def fixed(self, key: str = WEIGHT) -> list[tuple[str, str, float]]:
        """Names of both factors of each fixed update of a weight that is on, and its scale."""
        named = self.lora_fixed.get(key, ())
        return [one for one in named if self.updates_on or not one[0].endswith(START)]

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
        out: Tensor = super().forward(x)
        for a, b, scale in self.fixed():
            out = out + F.linear(F.linear(x, local(getattr(self, a))) * scale, local(getattr(self, b)))
        if not self.updates_on:
            return out
        taken = x if self.lora_dropout is None else self.lora_dropout(x)
        narrow = F.linear(taken, local(self.lora_A)) * self.lora_scales["weight"]
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
        own = ("lora_embedding_A", "lora_embedding_B", self.lora_scales[WEIGHT])
        for a, b, scale in (*self.fixed(), *([own] if self.updates_on else [])):
            # The module's own look-up, with its padding, its scale and its share of the rows.
            narrow = standing_in(self, {WEIGHT: local(getattr(self, a)).t()})
            found: Tensor = super(LowRankTable, narrow).forward(ids)
            out = out + F.linear(found * scale, local(getattr(self, b)))
        return out


class LowRankStacks(Adapted):
    """Experts with an update of each of some stacks, `W[e] + scale · B[e] A[e]`."""

    lora_product: Any
    """The product of rows and a stack, if the experts compute by one that can be replaced; else weights are updated
    before the forward."""

    def forward(self, *args: Any) -> Tensor:
        # What the module reads, by which a product knows its weight: in bf16 a narrow copy, as a gathered weight is.
        held = {name: local(getattr(self, name)) for name in self._parameters}
        updates = {key: [(held[a], held[b], scale) for a, b, scale in self.fixed(key)] for key in self.lora_scales}
        for key, scale in self.lora_scales.items() if self.updates_on else ():
            updates[key].append((held[f"{key}_lora_A"], held[f"{key}_lora_B"], scale))
        changed: dict[str, Any] = {}
        if self.lora_product is None:
            for key, a, b, scale in ((key, *one) for key, some in updates.items() for one in some):
                held[key] = torch.baddbmm(held[key], b, a, alpha=scale)
        else:
            changed["product"] = self._product({id(held[key]): update for key, update in updates.items()})
        found: Tensor = super(LowRankStacks, standing_in(self, held, **changed)).forward(*args)
        return found

    def _product(self, updates: Mapping[int, list[tuple[Tensor, Tensor, float]]]) -> Any:
        own: Any = self.product
        narrow = self.lora_product

        def product(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
            out: Tensor = own(rows, weight, sizes)
            for a, b, scale in updates.get(id(weight), ()):
                out = out + narrow(narrow(rows, a, sizes) * scale, b, sizes)
            return out

        return product


def standing_in(module: nn.Module, parameters: Mapping[str, Tensor], **changed: Any) -> Any:
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
    fixed: Sequence[Fixed] = (),
    dropout: Dropout | None = None,
    lr_ratio: float = 1.0,
    read: Read | None = None,
    dora: bool = False,
) -> None:
    """Give a weight its update, on the meta device. A factor that shares an axis along which the weight is split is
    split like it."""
    module, weight = target.module, target.weight
    for name, one in zip(target.factors, factors(target, rank), strict=True):
        setattr(module, name, nn.Parameter(one))
    for more in fixed:
        for name, one in zip(target.factors, factors(target, more.rank), strict=True):
            setattr(module, f"{name}_{more.kind}", nn.Parameter(one, requires_grad=False))
    if target.is_stack:
        if not isinstance(module, LowRankStacks):
            module.lora_product = getattr(module, "product", None)
            _stacks(module)
    elif target.is_embedding:
        _table(module)
    else:
        split = split_axis(weight)
        module.lora_dropout = dropout
        if dropout is not None and split == 1:
            mesh = mesh_of(weight)
            dropout.features_piece = (mesh.get_local_rank(), mesh.size())
        if type(module).forward is nn.Linear.forward:
            _replaceable(module)
        if dora:
            module.lora_magnitude = nn.Parameter(empty((len(weight),), weight, {0: 0}))
            module.lora_is_given = read is not None
            module.lora_adds_bias = module.bias is not None and split != 1  # else it is added to the sum over the ranks
            module.lora_group = mesh_of(weight).get_group().group_name if split == 1 else ""
        (_dora if dora else _low_rank)(module)
    _declare(target, scale, lr_ratio, read, fixed)


def _declare(target: Target, scale: float, lr_ratio: float, read: Read | None, fixed: Sequence[Fixed]) -> None:
    """Say how the factors begin, as PEFT draws them, and what their learning rates are."""
    module, (a, b) = target.module, target.factors
    if read is not None:
        starts = {name: Init("given", values=_reading(read, name[-1])) for name in (a, b)}
    elif any(one.kind == START for one in fixed):
        starts = {a: Init("zeros"), b: Init("zeros")}  # until the base is there
    elif target.is_embedding:
        starts = {a: Init("zeros"), b: Init("normal", 1.0)}
    else:  # uniform within ± 1/√in
        starts = {a: Init("uniform", 1 / math.sqrt(3 * target.weight.shape[-1])), b: Init("zeros")}
    if isinstance(module, Dora):
        starts[MAGNITUDE] = Init("zeros") if read is None else Init("given", values=_reading(read, "magnitude"))
    for one in fixed:
        for name in (a, b):
            given = one.read and _reading(one.read, name[-1])
            starts[f"{name}_{one.kind}"] = Init("given", values=given) if given else Init("zeros")
    named = {target.key: tuple((f"{a}_{one.kind}", f"{b}_{one.kind}", one.scale) for one in fixed)}
    module.lora_fixed = {**getattr(module, "lora_fixed", {}), **named}
    module.lora_initial = {**getattr(module, "lora_initial", {}), **starts}
    module.lora_scales = {**getattr(module, "lora_scales", {}), target.key: scale}
    module.lr_factors = {**getattr(module, "lr_factors", {}), **({} if target.is_embedding else {b: lr_ratio})}


def _reading(read: Read, factor: str) -> Callable[[int], Tensor]:
    return lambda _: read(factor)

"""Realises each style: weights are split, forwards run on this rank's part, collectives run in hooks around them.

A collective is a forward hook, so that it stays when a later transform replaces the module
(`forge_train_kit.modules.swap`). The product itself is a class's `forward` on the local weights: DTensor would cost a
millisecond of CPU per linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from forge_train import ConfigError, PluginError
from forge_train.mesh.tensors import local
from forge_train_kit.model import TensorStyle
from forge_train_kit.specialisation import Specialisation

from .collectives import Copy, GatherSequence, GatherWhole, Group, ScatterSequence, Sum, SumEverywhere, TakeShare


@dataclass
class Region:
    """One part of the model, split over the ranks of a mesh."""

    mesh: DeviceMesh
    group: Group
    sequence_parallel: bool
    loss_parallel: bool
    length: int = 0
    """Tokens per sequence of the forward at hand."""

    def enter(self, x: Tensor, positions: Tensor | None = None) -> None:
        """A forward of the part begins, with token ids, or with hidden states that another part has split.

        Without positions, split sequences count as long as the pieces: the last one must not be padded.
        """
        split = self.sequence_parallel and x.is_floating_point()
        if split and positions is not None:
            self.length = positions.shape[1]
        else:
            self.length = x.shape[1] * (self.group.size if split else 1)

    def gather(self, x: Tensor) -> Tensor:
        """Whole sequences for a block whose gradient each rank has a part of."""
        if not self.sequence_parallel:
            return cast(Tensor, Copy.apply(x, self.group))  # type: ignore[no-untyped-call]
        self._expect_piece(x)
        gathered = cast(Tensor, GatherSequence.apply(x, self.group))  # type: ignore[no-untyped-call]
        return gathered if gathered.shape[1] == self.length else gathered[:, : self.length].contiguous()

    def agreed(self, x: Tensor) -> Tensor:
        """Whole sequences for what every rank does alike."""
        if not self.sequence_parallel:
            return x
        self._expect_piece(x)
        return cast(Tensor, GatherWhole.apply(x, 1, self.length, self.group))  # type: ignore[no-untyped-call]

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of what the ranks have computed for whole sequences; this rank's piece of it, if so configured."""
        if not self.sequence_parallel:
            return cast(Tensor, Sum.apply(x, self.group))  # type: ignore[no-untyped-call]
        if missing := -x.shape[1] % self.group.size:
            x = F.pad(x, (0, 0, 0, missing))  # nothing ever looks at what becomes of these tokens
        return cast(Tensor, ScatterSequence.apply(x, self.group))  # type: ignore[no-untyped-call]

    def share(self, x: Tensor) -> Tensor:
        """This rank's share of the tokens, for a block in which they do not know each other."""
        if self.sequence_parallel:
            self._expect_piece(x)
            return x
        return cast(Tensor, TakeShare.apply(x, self.group))  # type: ignore[no-untyped-call]

    def join(self, x: Tensor) -> Tensor:
        """Return the output of such a block in the layout of the activations that follow."""
        if self.sequence_parallel:
            return x
        return cast(Tensor, GatherWhole.apply(x, 1, self.length, self.group))  # type: ignore[no-untyped-call]

    def _expect_piece(self, x: Tensor) -> None:
        if x.shape[1] != -(-self.length // self.group.size):
            raise PluginError(
                f"Under sequence parallelism a block was given {x.shape[1]} tokens per sequence, not its piece of "
                f"{self.length}: the tensor_plan() must name what comes before it (the embedding as 'vocabulary', "
                "projections into the residual stream as 'rowwise'), or set tp.sequence_parallel = false."
            )


def split(module: nn.Module, dim: int, region: Region, made: dict[int, nn.Parameter], names: tuple[str, ...]) -> None:
    """Replace a module's parameters by this rank's shards, without communication. Tied ones stay tied."""
    for name in names:
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        if id(parameter) not in made:
            made[id(parameter)] = _shard(parameter, dim, region.mesh)
        module._parameters[name] = made[id(parameter)]


def _shard(parameter: nn.Parameter, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    if isinstance(parameter, DTensor):
        raise ConfigError("tp: a weight is sharded already; tensor parallelism comes before whatever shards weights.")
    count, rank = mesh.size(), mesh.get_local_rank()
    each = -(-parameter.shape[dim] // count)
    start = min(rank * each, parameter.shape[dim])
    local = parameter.detach().narrow(dim, start, min(each, parameter.shape[dim] - start)).clone()
    sharded = DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


# -- forwards on this rank's part -----------------------------------------------------------------


class SplitLinear(nn.Linear):
    """`x Wᵀ (+ b)` with this rank's weights; another plugin may put another product in the place of `product`."""

    product = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, local(self.weight), local(self.bias))


class SummedLinear(nn.Linear):
    """`x Wᵀ` with this rank's weights; its hook adds the bias to the sum over the ranks. `product` as above."""

    product = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, local(self.weight))


class PartialLinear(SummedLinear):
    """The same, where a module around it has the sum; the first rank adds the bias."""

    first: bool

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        bias = self._parameters["bias"]
        return out if bias is None else out + bias * float(self.first)


class SplitEmbedding(nn.Embedding):
    """Rows of this rank's part of a table, zeros for the others."""

    first: int
    """The first of this rank's rows."""

    def forward(self, ids: Tensor) -> Tensor:
        weight = local(self.weight)
        rows, padding = ids - self.first, None
        if self.padding_idx is not None and 0 <= self.padding_idx - self.first < weight.shape[0]:
            padding = self.padding_idx - self.first
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        found = F.embedding(rows.masked_fill(elsewhere, 0), weight, padding)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)


class SpreadRMSNorm(nn.RMSNorm):
    """`x / √(mean(x²) + eps) · weight` over features of which this rank has some, in fp32."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = SumEverywhere.apply(wide.square().sum(-1, keepdim=True), self.group)  # type: ignore[no-untyped-call]
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        scale = torch.rsqrt(squares / self.normalized_shape[-1] + eps)
        normed: Tensor = wide * scale * local(self.weight).float()
        return normed.type_as(x)


# -- styles ---------------------------------------------------------------------------------------


class Styles:
    """Realises each style on one part. A hook is one object for all modules, so that units stay alike."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._change = Specialisation(lambda _, split: split)
        self._reduce, self._reduce_and_bias, self._gather, self._keep, self._collect = _hooks(region)
        self._share, self._join = _sharing(region)
        self._enter = lambda _, args: region.enter(args[0]) if args[0].ndim > 1 else None

    def realise(self, module: Any, style: TensorStyle, made: dict[int, nn.Parameter]) -> None:
        """Split a module and its weights."""
        if style in ("gather", "summed"):
            module.register_forward_pre_hook(self._gather)
        if style == "summed":
            module.register_forward_hook(self._reduce)
        elif style == "tokens":
            if hasattr(module, "sequence_piece"):
                module.sequence_piece = (self._region.group.rank, self._region.group.size)
            module.register_forward_pre_hook(self._share)
            module.register_forward_hook(self._join)
        elif style == "sequence" and self._region.sequence_parallel and hasattr(module, "sequence_piece"):
            module.sequence_piece = (self._region.group.rank, self._region.group.size)
        elif style == "heads" and hasattr(module, "heads_piece"):
            module.heads_piece = (self._region.group.rank, self._region.group.size)
        elif style == "channels":
            names = tuple(name for name, _ in module.named_parameters(recurse=False))
            split(module, 0, self._region, made, names)
        elif style in SHARDED:
            dim = SHARDED[style]
            split(module, dim, self._region, made, ("weight",) if dim == 1 else ("weight", "bias"))
            getattr(self, f"_{style}")(module)

    def _vocabulary(self, module: SplitEmbedding) -> None:
        self._change(module, SplitEmbedding)
        module.first = self._region.group.rank * -(-module.num_embeddings // self._region.group.size)
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._reduce)

    def _colwise(self, module: nn.Linear) -> None:
        self._change(module, SplitLinear)

    def _rowwise(self, module: nn.Linear) -> None:
        self._change(module, SummedLinear)
        module.register_forward_hook(self._reduce if module._parameters["bias"] is None else self._reduce_and_bias)

    def _partial(self, module: PartialLinear) -> None:
        self._change(module, PartialLinear)
        module.first = self._region.group.rank == 0

    def _features(self, module: SpreadRMSNorm) -> None:
        self._change(module, SpreadRMSNorm)
        module.group = self._region.group

    def _logits(self, module: nn.Linear) -> None:
        self._change(module, SplitLinear)
        module.register_forward_hook(self._keep if self._region.loss_parallel else self._collect)


def _hooks(region: Region) -> tuple[Callable[..., Any], ...]:
    def reduce(module: nn.Module, args: Any, out: Any) -> Any:
        return (region.reduce(out[0]), *out[1:]) if isinstance(out, tuple) else region.reduce(out)

    def reduce_and_bias(module: nn.Linear, args: Any, out: Tensor) -> Tensor:
        return region.reduce(out) + module.bias

    def gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args:
            raise PluginError(f"{type(module).__name__} is gathered by its tensor_plan(): pass its input by position.")
        return (region.gather(args[0]), *args[1:])

    def keep(module: nn.Linear, args: Any, out: Tensor) -> Tensor:
        shape = torch.Size((*out.shape[:-1], module.out_features))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(out, region.mesh, [Shard(out.ndim - 1)], run_check=False, shape=shape, stride=stride)

    def collect(module: nn.Linear, args: Any, out: Tensor) -> Tensor:
        features = module.out_features
        return cast(Tensor, GatherWhole.apply(out, -1, features, region.group))  # type: ignore[no-untyped-call]

    return reduce, reduce_and_bias, gather, keep, collect


def _sharing(region: Region) -> tuple[Callable[..., Any], ...]:
    def share(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args:
            raise PluginError(f"{type(module).__name__} shares its tokens out: pass its input by position.")
        return (region.share(args[0]), *args[1:])

    def join(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return region.join(out)

    return share, join


SHARDED: Mapping[str, int] = {"vocabulary": 0, "colwise": 0, "rowwise": 1, "partial": 1, "features": 0, "logits": 0}
"""Style → the axis of the weight that is split."""

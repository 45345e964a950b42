"""Weights that FSDP2 gathers in float8.

A group's communication is replaced, through torch's `FSDPModule.set_custom_all_gather`. FSDP2's other extension, a pair
of methods on a parameter's local tensor, has to be put there again whenever that tensor is made anew; and (torch 2.13)
it takes no scales beside shards that are uneven or cut along columns, and loses them where a mesh has one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from .layers import candidates
from .recipes import ROWS

BITS = 23
"""Of a float32's mantissa: the exponent lies above."""


def packed(rows: Tensor) -> Tensor:
    """`[…, columns]` → uint8 `[…, columns + 1]`: e4m3, and last the exponent of the row's scale, as in OCP's e8m0.

    Scales are powers of two, so that rounding once more to e4m3, with another such scale for the row, its column or the
    whole weight, changes nothing, except for values that are subnormal under the larger of the two scales: those below
    2^-6 of it, and so below 1/14336 of the largest value that shares it. They move by one step, 2^-9 of it, at most.
    """
    rows = rows.float()
    scale = ROWS.scale(rows)
    exponent = (scale.view(torch.int32) >> BITS).bitwise_and(255).to(torch.uint8)
    return torch.cat([(rows / scale).to(torch.float8_e4m3fn).view(torch.uint8), exponent], -1)


def unpack(rows: Tensor, out: Tensor) -> None:
    """Unpack `packed` values into `[…, columns]`; exact in bfloat16. A row with a non-finite scale is not finite."""
    wide = torch.float32 if out.dtype is torch.float16 else out.dtype  # half precision has too few exponents
    scale = (rows[..., -1:].int() << BITS).view(torch.float32)
    out.copy_(rows[..., :-1].view(torch.float8_e4m3fn).to(wide).mul_(scale.to(wide)))


@dataclass(frozen=True)
class Piece:
    """One parameter's contribution to a gather, padded as in FSDP2."""

    shape: torch.Size
    packed: bool

    def pack(self, shard: Tensor) -> Tensor:
        """`[numel]` → bytes."""
        return packed(shard.view(self.shape)).flatten() if self.packed else shard.view(torch.uint8)

    def unpack(self, shards: Tensor, out: Tensor) -> None:
        """Bytes of each rank `[ranks, bytes]`, into `[ranks, numel]`."""
        if self.packed:
            *leading, columns = self.shape
            unpack(torch.unflatten(shards, 1, (*leading, columns + 1)), torch.unflatten(out, 1, self.shape))
        else:
            out.view(torch.uint8).copy_(shards)


class PackedGather(AllGather):
    """Gathers a group's parameters as bytes.

    Args:
        pieces: of all parameters of the group, in its order.
        plain: the communication that was there.
    """

    def __init__(self, pieces: Sequence[Piece], plain: AllGather) -> None:
        self.pieces, self.plain = pieces, plain
        self.sizes = [math.prod(piece.shape) for piece in pieces]

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.plain.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """As `AllGather`. Never asynchronous: the result is unpacked on the stream that gathers."""
        sent = [piece.pack(one) for piece, one in zip(self.pieces, torch.split(input_tensor, self.sizes), strict=True)]
        mine = torch.cat(sent)
        everybody = self.allocate((len(mine) * group.size(),), dtype=torch.uint8, device=mine.device)
        self.plain(everybody, mine, group)
        shards = torch.split(everybody.view(group.size(), -1), [len(one) for one in sent], 1)
        outs = torch.split(output_tensor.view(group.size(), -1), self.sizes, 1)
        for piece, some, out in zip(self.pieces, shards, outs, strict=True):
            piece.unpack(some, out)


def weights_of(part: nn.Module, names: Mapping[str, Any]) -> dict[tuple[int, str], str]:
    """Module and key → global name, of the weights of modules that multiply in low precision.

    Args:
        part: where they are.
        names: of these modules.
    """
    return {
        (id(one.module), key): f"{one.name}.{key}"
        for one in candidates(part)
        if one.name in names
        for key, value in one.module._parameters.items()
        if any(value is weight for weight in one.weights)
    }


def gather_packed(part: nn.Module, weights: Mapping[tuple[int, str], str]) -> tuple[list[str], int]:
    """Have FSDP2 gather weights in e4m3; their names, and how many groups of parameters are gathered at all.

    Args:
        part: sharded by `fully_shard`.
        weights: as `weights_of` gives them. One that another module holds too is gathered as it is.
    """
    found, groups = [], 0
    for module in part.modules():
        if not isinstance(module, FSDPModule):
            continue
        group: Any = module._get_fsdp_state()._fsdp_param_group
        if group is None or getattr(group.mesh_info, "shard_mesh_size", 1) == 1:
            continue
        groups += 1
        owners = [_owners(parameter._module_info) for parameter in group.fsdp_params]
        pack = [all(owner in weights for owner in some) for some in owners]
        if any(pack):
            shapes = [parameter.padded_sharded_param_size for parameter in group.fsdp_params]
            pieces = [Piece(shape, one) for shape, one in zip(shapes, pack, strict=True)]
            module.set_custom_all_gather(PackedGather(pieces, group._all_gather_comm))
            found += [weights[some[0]] for some, one in zip(owners, pack, strict=True) if one]
    return found, groups


def _owners(info: Any) -> list[tuple[int, str]]:
    """All modules that hold a parameter, with their key for it."""
    modules = (info.module, *info.shared_modules)
    keys = (info.param_name, *info.shared_param_names)
    return [(id(module), key) for module, key in zip(modules, keys, strict=True)]

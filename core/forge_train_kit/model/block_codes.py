"""Tensors that hold 4- or 8-bit codes of their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_train import ConfigError

from .block_format import BlockFormat

aten = torch.ops.aten


class BlockTensor(Tensor):
    """Frozen values in a `BlockFormat`, in the place of a plain tensor of `dtype`.

    What is copied into it is encoded. Rows, columns in whole blocks and the transpose are views. A product decodes it
    in the forward and again in the backward pass. Any other operation decodes it first. FSDP2 gathers its parts.
    """

    parts: tuple[Tensor, ...]
    format: BlockFormat
    turned: bool
    """Its last two axes are exchanged."""

    @staticmethod
    def __new__(
        cls,
        parts: Sequence[Tensor],
        format: BlockFormat,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        turned: bool = False,
    ) -> BlockTensor:
        codes = parts[0]
        columns = codes.shape[-1] * (2 if format.kind == "nf4" else 1)
        size = (*codes.shape[:-1], columns) if shape is None else tuple(shape)
        strides = torch.empty((*codes.shape[:-1], columns), device="meta").mT.stride() if turned else None
        return Tensor._make_wrapper_subclass(
            cls, size, strides=strides, dtype=dtype, device=codes.device, requires_grad=False
        )

    def __init__(
        self,
        parts: Sequence[Tensor],
        format: BlockFormat,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        turned: bool = False,
    ) -> None:
        self.parts, self.format, self.turned = tuple(parts), format, turned

    @classmethod
    def of(cls, values: Tensor, format: BlockFormat) -> BlockTensor:
        """Encode values; on the meta device there are none.

        Raises:
            ValueError: if a row does not consist of whole blocks.
        """
        if values.shape[-1] % format.block:
            raise ValueError(f"rows of {values.shape[-1]} values do not consist of blocks of {format.block}")
        made = format.empty(values.shape, values.device) if values.is_meta else format.encode(values)
        return cls(made, format, values.dtype)

    def plain(self) -> Tensor:
        """The values, as a plain tensor."""
        values = self.format.decode(self.parts, self.dtype)
        return values.mT if self.turned else values.view(self.shape)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has a keyword, which its stub calls `Any`
        return f"BlockTensor({[*self.shape]}, {self.format.kind}, block={self.format.block}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        for at, one in enumerate(self.parts):
            setattr(self, f"part_{at}", one)
        return [f"part_{at}" for at in range(len(self.parts))], (self.format, self.dtype, self.turned)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], kept: Any, size: Any, stride: Any) -> BlockTensor:
        format, dtype, turned = kept
        return BlockTensor([inner[name] for name in sorted(inner)], format, dtype, size, turned)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has what switches it off
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = _KNOWN.get(func)
        fits = known in _OF_TURNED or not any(getattr(one, "turned", False) for one in args[:1])
        if known is not None and fits and (found := known(*args, **kwargs)) is not NotImplemented:
            return found
        several = args[0] if isinstance(args[0], list | tuple) else ()
        if func._schema.is_mutable and any(isinstance(one, cls) for one in (kwargs.get("out"), *several)):
            raise NotImplementedError(f"{func} would lose what it writes into a BlockTensor.")
        written = args[0] if func._schema.is_mutable and isinstance(args[0], cls) else None
        plain, more = torch.utils._pytree.tree_map_only(cls, cls.plain, (args, kwargs))
        found = func(*plain, **more)
        if written is None:
            return found
        written.copy_(plain[0])
        return written

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The parts, for FSDP2 to gather, and the number of ranks."""
        return self.parts, mesh.size()

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], ranks: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Whole weights of what FSDP2 gathered; `out` already lies over it."""
        if out is not None:
            return None
        if ranks == 1:  # where torch (2.13) gathers codes alone
            return BlockTensor(self.parts, self.format, dtype), ()
        return BlockTensor(gathered, self.format, dtype), gathered


def _linear(x: Tensor, weight: BlockTensor, bias: Tensor | None = None) -> Tensor:
    product: Any = _Linear.apply
    found: Tensor = product(x, weight, bias)
    return found


class _Linear(torch.autograd.Function):
    """`x Wᵀ + b` that keeps the codes, and not the weights, for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: BlockTensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight.plain(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight.plain() if ctx.needs_input_grad[0] else None, None, bias


# -- operations on the parts themselves --------------------------------------------------------------------------------

_KNOWN: dict[Any, Callable[..., Any]] = {}


def _does(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def remember(function: Callable[..., Any]) -> Callable[..., Any]:
        _KNOWN.update(dict.fromkeys(functions, function))
        return function

    return remember


def _with(tensor: BlockTensor, parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> BlockTensor:
    return BlockTensor(parts, tensor.format, dtype or tensor.dtype)


def _is_natural(tensor: BlockTensor) -> bool:
    """Return True if it has the shape of its parts, and was not reshaped."""
    return tensor.shape[:-1] == tensor.parts[0].shape[:-1]


@_does(aten.detach.default, aten.alias.default)
def _same(tensor: BlockTensor) -> BlockTensor:
    return BlockTensor(tensor.parts, tensor.format, tensor.dtype, tensor.shape, tensor.turned)


@_does(aten.transpose.int, aten.t.default, aten.mT.default)
def _transpose(tensor: BlockTensor, first: int = -2, second: int = -1) -> Any:
    ndim = tensor.ndim
    if {first % ndim, second % ndim} != {ndim - 2, ndim - 1} or not (tensor.turned or _is_natural(tensor)):
        return NotImplemented
    *rows, height, width = tensor.shape
    return BlockTensor(tensor.parts, tensor.format, tensor.dtype, (*rows, width, height), not tensor.turned)


@_does(aten.unbind.int)
def _unbind(tensor: BlockTensor, dim: int = 0) -> Any:
    """Experts, one by one: a loop over them keeps the codes of each."""
    if dim % tensor.ndim == tensor.ndim - 1 or not _is_natural(tensor):
        return NotImplemented
    return [_select(tensor, dim, at) for at in range(tensor.shape[dim])]


@_does(aten.clone.default)
def _clone(tensor: BlockTensor, memory_format: Any = None) -> BlockTensor:
    return BlockTensor([one.clone() for one in tensor.parts], tensor.format, tensor.dtype, tensor.shape)


@_does(aten._to_copy.default)
def _to_copy(tensor: BlockTensor, dtype: Any = None, device: Any = None, **more: Any) -> BlockTensor:
    moved = [one.to(device, copy=True) for one in tensor.parts]
    return BlockTensor(moved, tensor.format, dtype or tensor.dtype, tensor.shape)


@_does(aten.empty_like.default)
def _empty_like(tensor: BlockTensor, dtype: Any = None, device: Any = None, **more: Any) -> BlockTensor:
    made = [torch.empty_like(one, device=device) for one in tensor.parts]
    return BlockTensor(made, tensor.format, dtype or tensor.dtype, tensor.shape)


@_does(aten.new_zeros.default)
def _new_zeros(tensor: BlockTensor, size: Sequence[int], **more: Any) -> Any:
    if not _is_natural(tensor) or size[-1] % tensor.format.block:
        return NotImplemented
    made = tensor.format.empty(size, more.get("device") or tensor.device)
    return _with(tensor, [one.zero_() for one in made], more.get("dtype"))


@_does(aten.view.default, aten._unsafe_view.default)
def _view(tensor: BlockTensor, size: Sequence[int]) -> BlockTensor:
    shape = torch.empty(tensor.shape, device="meta").view(size).shape
    return BlockTensor(tensor.parts, tensor.format, tensor.dtype, shape)


@_does(aten.as_strided.default)
def _as_strided(tensor: BlockTensor, size: Any, stride: Any, offset: Any = None) -> Any:
    same = tuple(size) == tuple(tensor.shape) and tuple(stride) == tensor.stride() and not offset
    return _same(tensor) if same else NotImplemented


@_does(aten.slice.Tensor)
def _slice(tensor: BlockTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    axis, size = dim % tensor.ndim, tensor.shape[dim]
    low, high, _ = slice(start, end).indices(size)
    if not _is_natural(tensor) or step != 1:
        raise _no_view(tensor)
    if axis < tensor.ndim - 1:
        return _with(tensor, [one.narrow(axis, low, max(high - low, 0)) for one in tensor.parts])
    if (low, high) == (0, size):
        return _same(tensor)
    block = tensor.format.block
    if low % block or high % block or tensor.format.double:
        raise _no_view(tensor)
    share = [(one, size // one.shape[-1]) for one in tensor.parts]
    return _with(tensor, [one.narrow(-1, low // each, (high - low) // each) for one, each in share])


@_does(aten.select.int)
def _select(tensor: BlockTensor, dim: int, index: int) -> Any:
    if not _is_natural(tensor) or dim % tensor.ndim == tensor.ndim - 1:
        raise _no_view(tensor)
    return _with(tensor, [one.select(dim, index) for one in tensor.parts])


@_does(aten.split.Tensor)
def _split(tensor: BlockTensor, size: int, dim: int = 0) -> list[BlockTensor]:
    if tensor.shape[dim] % size:
        raise ConfigError(
            f"A weight of {' × '.join(map(str, tensor.shape))} in codes can't be split into uneven shares of {size}: "
            "choose another parallel.dp_shard, or leave it as it is."
        )
    return [_slice(tensor, dim, start, start + size) for start in range(0, tensor.shape[dim], size)]


def _no_view(tensor: BlockTensor) -> ConfigError:
    """A copy would take what is written into it, and lose it."""
    whole = "whole rows" if tensor.format.double else f"whole blocks of {tensor.format.block} values"
    return ConfigError(
        f"A weight of {' × '.join(map(str, tensor.shape))} in codes has parts of {whole} only: it can't be split, or "
        "filled from a checkpoint that was split, within them."
    )


@_does(aten.copy_.default)
def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, BlockTensor):
        return NotImplemented
    if isinstance(source, BlockTensor) and (source.turned or target.turned):
        source = source.plain()
    if target.turned:
        _copy(_transpose(target), source.expand(target.shape).mT)
        return target
    if isinstance(source, BlockTensor) and source.format == target.format and source.shape == target.shape:
        parts = source.parts
    elif target.is_meta:
        return target
    else:
        plain = source.plain() if isinstance(source, BlockTensor) else source
        natural = (*target.parts[0].shape[:-1], -1)
        parts = target.format.encode(plain.to(target.device).expand(target.shape).reshape(natural))
    for own, new in zip(target.parts, parts, strict=True):
        own.copy_(new, non_blocking=non_blocking)
    return target


_OF_TURNED = (_same, _transpose, _copy)

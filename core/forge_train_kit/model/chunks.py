"""Losses computed in chunks, so that a head's outputs never exist all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS = 2**23
"""Number of logits that may always exist at once: 32 MiB in fp32."""
CHUNKS = 16
"""More chunks than this save little memory and make the head's matrix products small."""

_Loss = TypeVar("_Loss", Tensor, tuple[Tensor, Tensor])


def sum_in_chunks(loss: Callable[..., _Loss], head: nn.Module, tokens: int, *along: Tensor) -> _Loss:
    """The sum of a loss over chunks of the sequence.

    On one process, each chunk's gradients are computed right after its loss: three products with the head's weights,
    which are cast once. Where weights are spread over ranks or the loss is scaled (fp16), a chunk is recomputed in the
    backward pass instead, in four products. Either way, a chunk's outputs are freed before the next one's exist.

    Args:
        loss: the loss of one chunk of each tensor, 0-dim; or a pair of it and of values without a gradient, of the same
            shape for each chunk, which are summed too. A loss of another shape is recomputed in any case.
        head: the module that it calls.
        tokens: per chunk; 0 chooses.
        along: `[batch, sequence, …]`. They are cut along the sequence, so that the head still gets `[batch, …, dim]`,
            because tensor parallelism relies on its axes.
    """
    batch, sequence = along[0].shape[:2]
    length = max(1, (tokens or chosen(batch * sequence, head)) // batch)
    if length < sequence and torch.is_grad_enabled():
        weights = [one for one in head.parameters() if one.requires_grad]
        if _can_run_ahead(along, weights):
            with suppress(_ForeignError):  # such a loss is recomputed: autograd then finds all that it depends on
                return _Sum.apply(loss, head, length, len(along), *along, *weights)  # type: ignore[no-any-return,no-untyped-call]
    pieces = zip(*(torch.split(one, length, dim=1) for one in along), strict=True)
    if length >= sequence or not torch.is_grad_enabled():
        found: Any = [loss(*piece) for piece in pieces]
    else:
        found = [checkpoint(loss, *piece, use_reentrant=False) for piece in pieces]
    if isinstance(found[0], tuple):
        found = tuple(sum(column[1:], column[0]) for column in zip(*found, strict=True))
    else:
        found = sum(found[1:], found[0])
    return found  # type: ignore[no-any-return]


def chosen(tokens: int, head: nn.Module) -> int:
    """Tokens per chunk. A head that does not declare the width of its logits is assumed to be large."""
    return max(LOGITS // getattr(head, "out_features", 2**17), tokens // CHUNKS, 1)


@contextmanager
def _cast_once(head: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yields parameters of a head with the narrow copies that its modules hold in their place for so long.

    Modules that compute in a narrow dtype cast a parameter whenever they read it (plugin `precision`).
    """
    copies: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
    swapped: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in head.modules():
            for name, parameter in module._parameters.items():
                read = getattr(module, name)
                if parameter is None or not _is_cast(read, parameter):
                    continue
                copy = read.detach().requires_grad_(parameter.requires_grad)
                pair = copies.setdefault((id(parameter), copy.dtype), (parameter, copy))
                swapped.append((module, name, parameter))
                module._parameters[name] = cast("Any", pair[1])
        yield [*copies.values()]
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter


def _is_cast(read: Tensor, parameter: Tensor) -> bool:
    """Return True if a tensor is just a parameter in another dtype."""
    node = read.grad_fn
    if read.dtype is parameter.dtype or node is None:
        return read.dtype is not parameter.dtype
    return node.name() == "ToCopyBackward0" and getattr(node.next_functions[0][0], "variable", None) is parameter


def _can_run_ahead(along: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Return True if gradients may be computed before those of the loss are known.

    FSDP2 and tensor parallelism put their collectives around the head's own backward pass. In fp16, gradients of an
    unscaled loss underflow.
    """
    plain = all(type(one) is nn.Parameter for one in weights)
    narrow = any(one.dtype is torch.float16 for one in (*along, *weights))
    trained = any(one.requires_grad for one in (*along, *weights))
    return trained and plain and not narrow and not (dist.is_available() and dist.is_initialized())


class _ForeignError(Exception):
    """The loss is not a scalar, or depends on a tensor that is neither split by sequence nor a weight of the head."""


class _Sum(torch.autograd.Function):
    """The sum of a loss over chunks, and its gradients, computed with it."""

    @staticmethod
    def forward(ctx: Any, loss: Callable[..., Any], head: nn.Module, length: int, count: int, *tensors: Tensor) -> Any:
        along, weights = tensors[:count], tensors[count:]
        wanted = [index for index in range(count) if ctx.needs_input_grad[4 + index]]
        of_along = {index: torch.empty_like(along[index]) for index in wanted}
        of_weights: dict[int, Tensor] = {}
        sums: list[Tensor] = []
        with torch.enable_grad(), _cast_once(head) as copies:
            narrow = [pair for pair in copies if any(pair[0] is one for one in weights)]
            owners = [*weights, *(owner for owner, _ in narrow)]
            for start in range(0, along[0].shape[1], length):
                piece = [one[:, start : start + length].detach() for one in along]
                for index in wanted:
                    piece[index].requires_grad_()
                # As views: some hooks of torch (multi-gradient hooks, 2.13) refuse leaves in `autograd.grad`.
                given = loss(*(one.view_as(one) for one in piece))
                value, *seen = given if isinstance(given, tuple) else (given,)
                inputs = [*(piece[index] for index in wanted), *weights, *(copy for _, copy in narrow)]
                if not sums:
                    _expect_leaves(value, inputs)
                found: Sequence[Tensor | None] = torch.autograd.grad(value, inputs, allow_unused=True)
                for index, gradient in zip(wanted, found, strict=False):
                    of_along[index][:, start : start + length] = 0 if gradient is None else gradient
                for owner, gradient in zip(owners, found[len(wanted) :], strict=True):
                    _add(of_weights, owner, gradient)
                values = [one.detach() for one in (value, *seen)]
                sums = [one + other for one, other in zip(sums, values, strict=True)] if sums else values
                del given, value, found
        ctx.order = [*wanted, *(count + at for at, one in enumerate(weights) if id(one) in of_weights)]
        ctx.save_for_backward(*of_along.values(), *(of_weights[id(one)] for one in weights if id(one) in of_weights))
        ctx.inputs = len(tensors)
        ctx.mark_non_differentiable(*sums[1:])
        return tuple(sums) if len(sums) > 1 else sums[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * ctx.inputs
        for index, gradient in zip(ctx.order, ctx.saved_tensors, strict=True):
            if ctx.needs_input_grad[4 + index]:
                found[index] = gradient * gradients[0]
        return None, None, None, None, *found


def _add(sums: dict[int, Tensor], owner: Tensor, gradient: Tensor | None) -> None:
    """Sums are in the weight's own dtype, fp32, where the gradients of a narrow copy are narrow."""
    if gradient is None:
        return
    if id(owner) in sums:
        sums[id(owner)] += gradient
    else:
        sums[id(owner)] = gradient.to(owner.dtype, copy=True)


def _expect_leaves(value: Tensor, leaves: Sequence[Tensor]) -> None:
    """Refuse a loss whose gradients would be lost.

    Raises:
        _ForeignError: if it is not a scalar, or its graph ends in another tensor that wants a gradient.
    """
    if value.dim():
        raise _ForeignError
    known = {id(one) for one in leaves}
    seen, ahead = set[Any](), [value.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None and id(variable) not in known:
            raise _ForeignError
        ahead += [one for one, _ in node.next_functions]

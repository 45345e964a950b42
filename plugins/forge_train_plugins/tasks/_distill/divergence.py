"""Divergences of a student from its teacher, over the vocabulary or over a few tokens and all others together."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_train_kit.model import full_tensor
from forge_train_kit.model.chunks import chosen

Kind = Literal["forward", "reverse", "jensen_shannon"]
LEAST = 1e-38
"""The least sum of exponentials whose logarithm is taken: a normal number of fp32."""


def divergence(kind: Kind, teacher: Tensor, student: Tensor) -> Tensor:
    """The divergence of each token, from log-probabilities `[…, classes]`, which may be split over ranks."""
    if kind == "forward":
        return kl(teacher, student)
    if kind == "reverse":
        return kl(student, teacher)
    middle = torch.logaddexp(teacher, student) - math.log(2)
    return (kl(teacher, middle) + kl(student, middle)) / 2


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) of log-probabilities, over the last dimension."""
    return full_tensor((log_p.exp() * (log_p - log_q)).sum(-1))


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-probabilities of the whole vocabulary, split over ranks as the logits are."""
    return logits - logits.logsumexp(-1, keepdim=True)


def likeliest(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return whether no token has a larger logit than this one, `[…]`; `logits […, vocabulary]` may be split."""
    part = _Part(logits)
    at, mine = part.places(tokens.unsqueeze(-1))
    found = part.logits.gather(-1, at.where(mine, 0)).where(mine, 0.0).squeeze(-1)
    peak = part.logits.amax(-1)
    part.reduce(found, "sum")
    part.reduce(peak, "max")
    return found >= peak


def top_log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of k tokens and of all others together, `[…, k + 1]`.

    Args:
        logits: `[…, vocabulary]` fp32, which may be split over ranks along the vocabulary.
        tokens: `[…, k]`, different ones wherever the result has a gradient.
    """
    part = _Part(logits)
    return _Top.apply(part.logits, tokens, part)  # type: ignore[no-any-return,no-untyped-call]


class _Part:
    """This rank's part of logits that may be split along the vocabulary."""

    def __init__(self, logits: Any) -> None:
        self.first, self.groups = 0, list[Any]()
        if not hasattr(logits, "to_local"):
            self.logits: Tensor = logits
        else:
            self.logits, mesh = logits.to_local(), logits.device_mesh
            for axis in (axis for axis, placement in enumerate(logits.placements) if placement.is_shard()):
                width = -(-logits.shape[-1] // mesh.size(axis))  # torch cuts a dimension as `torch.chunk` does
                self.first += mesh.get_local_rank(axis) * width
                self.groups.append(mesh.get_group(axis))
        self.width = self.logits.shape[-1]

    def places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of tokens, the one after the last for those of other ranks; and which are this rank's."""
        at = tokens - self.first
        mine = (at >= 0) & (at < self.width)
        return at.where(mine, self.width), mine

    def reduce(self, values: Tensor, op: Literal["sum", "max"]) -> None:
        """Reduce in place over the ranks that the vocabulary is split over."""
        for group in self.groups:
            dist.all_reduce(values, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=group)


class _Top(torch.autograd.Function):
    """`top_log_probabilities`, with one product for the gradient of each logit. On every rank of a split vocabulary,
    the result is that of all of it, and its gradient is the same."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, part: _Part) -> Tensor:
        peak = logits.amax(-1, keepdim=True)
        part.reduce(peak, "max")
        others = (logits - peak).exp_()
        everything = others.sum(-1, keepdim=True)
        at, mine = part.places(tokens)
        if part.groups:  # a column for the tokens of other ranks
            others = torch.cat([others, torch.zeros_like(everything)], -1)
        named = (logits.gather(-1, at.where(mine, 0)) - peak).where(mine, 0.0)
        others.scatter_(-1, at, 0.0)
        found = torch.cat([everything, others.sum(-1, keepdim=True), named], -1)
        part.reduce(found, "sum")
        everything, rest, named = found[..., :1], found[..., 1:2], found[..., 2:]
        ctx.save_for_backward(others, at, everything, rest, named)
        ctx.width = part.width
        result: Tensor = torch.cat([named, rest.clamp(min=LEAST).log()], -1) - everything.log()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        others, at, everything, rest, named = ctx.saved_tensors
        of_named, of_rest = gradients[0][..., :-1], gradients[0][..., -1:]
        of_all = gradients[0].sum(-1, keepdim=True) / everything
        found = others * (torch.where(rest > LEAST, of_rest / rest, 0.0) - of_all)
        found.scatter_(-1, at, of_named - of_all * named.exp())
        return found[..., : ctx.width], None, None


def top_of(head: nn.Module, hidden: Tensor, k: int, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens at each position, and the log-probabilities of these and of all others together.

    `[batch, sequence, k]` int32, and `[batch, sequence, k + 1]` fp32. The logits of a chunk are gathered.
    """
    batch, sequence = hidden.shape[:2]
    length = max(1, (chunk or chosen(batch * sequence, head)) // batch)
    tokens, values = [], []
    for piece in torch.split(hidden, length, dim=1):
        logits = full_tensor(head(piece)).float() / temperature
        top = logits.topk(k, -1).indices
        values.append(top_log_probabilities(logits, top))
        tokens.append(top.int())
    return torch.cat(tokens, 1), torch.cat(values, 1)

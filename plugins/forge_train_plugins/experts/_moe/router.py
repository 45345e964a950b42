"""Chooses the experts of each token, and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Init
from forge_train_kit.model import record_choices


@dataclass
class Routing:
    """Decision of a router for `tokens` tokens."""

    experts: Tensor
    """`[tokens, top_k]` int64; −1 means no expert."""
    weights: Tensor
    """`[tokens, top_k]` float32."""
    shares: Tensor
    """Scores of each token, summing to one, `[tokens, experts]` float32."""
    logits: Tensor
    """`[tokens, experts]` float32."""
    allowed: Tensor | None = None
    """The experts of each token's group, `[tokens, experts]` bool; None for all."""


@dataclass(frozen=True)
class Choice:
    """Rules for choosing and weighting experts."""

    top_k: int
    """Number of experts that a token takes."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Softmax over the experts (Switch, Mixtral), or sigmoid of each (DeepSeek-V3)."""
    normalise: bool = True
    """Divide the weights of a token's experts by their sum."""
    scaling: float = 1.0
    """Factor on the weights."""
    groups: int = 1
    """Number of groups of neighbouring experts."""
    top_groups: int = 1
    """Number of groups that a token may choose from."""
    group_best: int = 2
    """Number of a group's best scores whose sum ranks it."""
    jitter: float = 0.0
    """Noise on the input in training."""


class Router(nn.Module):
    """Scores from a linear layer, computed in fp32; the best experts are chosen.

    Args:
        dim: width of tokens.
        experts: how many there are.
        choice: how experts are chosen.
        biased: whether scores get a bias that affects only the choice (arXiv:2408.15664).
        std: standard deviation of initial weights.
        learned: whether the logits have a bias.
        group: the group of each expert; None if a token may choose among all.
    """

    bias: Tensor | None
    group: Tensor | None
    logit_bias: Tensor | None

    def __init__(
        self,
        dim: int,
        experts: int,
        choice: Choice,
        *,
        biased: bool = False,
        std: float = 0.02,
        learned: bool = False,
        group: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.choice, self.std, self._group = choice, std, group
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.register_parameter("logit_bias", nn.Parameter(torch.empty(experts)) if learned else None)
        self.register_buffer("bias", torch.zeros(experts) if biased else None)
        numbers = None if group is None else torch.tensor(list(group))
        self.register_buffer("group", numbers, persistent=False)

    def initial(self, name: str) -> Init:
        return Init("normal", self.std) if name == "weight" else Init("zeros")

    def reset_buffers(self) -> None:
        if self.bias is not None:
            self.bias.zero_()
        if self.group is not None and self._group is not None:
            self.group.copy_(torch.tensor(list(self._group)))

    def forward(self, x: Tensor, of_tokens: Tensor | None = None) -> Routing:
        """`x [tokens, dim]`, and the group of each if experts are divided → the routing."""
        allowed = None if of_tokens is None or self.group is None else of_tokens[:, None] == self.group
        scores, shares, logits = self.score(x, allowed)
        by = self._choose(scores.detach())
        by = by if allowed is None else by.masked_fill(~allowed, -torch.inf)
        experts = by.topk(self.choice.top_k, dim=-1).indices
        record_choices(self, "experts", lambda: (by, _mask(by, experts)))
        weights = scores.gather(1, experts)
        if self.choice.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * self.choice.scaling, shares, logits, allowed)

    def score(self, x: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, shares and logits of `x [tokens, dim]`, each `[tokens, experts]` float32; the first two are 0 where
        an expert is not allowed."""
        x = x.float()
        if self.choice.jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - self.choice.jitter, 1 + self.choice.jitter)
        logits = F.linear(x, self.weight.float(), None if self.logit_bias is None else self.logit_bias.float())
        if self.choice.scores == "softmax":
            shares = (logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)).softmax(-1)
            return shares, shares, logits
        scores = logits.sigmoid() if allowed is None else logits.sigmoid().masked_fill(~allowed, 0.0)
        return scores, scores / (scores.sum(-1, keepdim=True) + 1e-20), logits

    def mean_loads(self, loads: Tensor) -> Tensor:
        """Loads `[…, experts]` → the mean over the experts of each one's group, the same shape."""
        if self.group is None or self._group is None:
            return loads.mean(-1, keepdim=True).expand_as(loads)
        groups = torch.arange(max(self._group) + 1, device=loads.device)
        member = (self.group[:, None] == groups).to(loads.dtype)
        return (loads @ member / member.sum(0))[..., self.group]

    def _choose(self, scores: Tensor) -> Tensor:
        """The scores that decide the choice: with the bias, and −∞ outside the token's groups."""
        if self.bias is not None:
            scores = scores + self.bias
        if self.choice.groups == 1:
            return scores
        by_group = scores.view(len(scores), self.choice.groups, -1)
        best = by_group.topk(min(self.choice.group_best, by_group.shape[-1]), dim=-1).values.sum(-1)
        allowed = _mask(best, best.topk(self.choice.top_groups, dim=-1).indices)
        record_choices(self, "groups", lambda: (best, allowed))
        return by_group.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)


def _mask(scores: Tensor, chosen: Tensor) -> Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)


def kept(experts: Tensor, weights: Tensor, limit: int | Tensor, count: int) -> Tensor:
    """Mark those of `experts [tokens, top_k]` that are among their expert's `limit` greatest weights, bool. The limit
    may be one for each expert."""
    flat = experts.flatten()
    by_weight = weights.flatten().argsort(descending=True, stable=True)
    order = by_weight[flat[by_weight].argsort(stable=True)]
    sizes = loads(experts.view(1, -1), count)[0]
    place = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[flat[order]]
    limit = limit[flat[order]] if isinstance(limit, Tensor) else limit
    return torch.empty_like(flat, dtype=torch.bool).index_copy(0, order, place < limit).view_as(experts)


def loads(experts: Tensor, count: int) -> Tensor:
    """Number of assignments to each expert, per row of `experts [sets, assignments]`: `[sets, count]` int64."""
    found = torch.zeros(len(experts), count, dtype=torch.int64, device=experts.device)
    return found.scatter_add(1, experts, torch.ones_like(experts))

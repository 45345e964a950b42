"""Which experts each token goes to, and with what weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Init, record_choices


@dataclass
class Routing:
    """What a router decided for `tokens` tokens."""

    experts: Tensor
    """`[tokens, top_k]` int64; −1 goes nowhere."""
    weights: Tensor
    """`[tokens, top_k]` float32."""
    shares: Tensor
    """Scores of each token, summing to one, `[tokens, experts]` float32."""
    logits: Tensor
    """`[tokens, experts]` float32."""


@dataclass(frozen=True)
class Choice:
    """How experts are chosen, and weighed."""

    top_k: int
    """How many a token takes."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Over the experts (Switch, Mixtral), or of each (DeepSeek-V3)."""
    normalise: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    scaling: float = 1.0
    """Factor on the weights."""
    groups: int = 1
    """Of neighbouring experts."""
    top_groups: int = 1
    """From how many of these a token may choose."""
    group_best: int = 2
    """How many of a group's best scores are summed to choose it."""
    jitter: float = 0.0
    """Noise on the input in training."""


class Router(nn.Module):
    """Scores from a linear layer, computed in fp32; the best experts are chosen.

    Args:
        dim: width of tokens.
        experts: how many there are.
        choice: of experts.
        biased: whether there is a bias that takes part in the choice alone (arXiv:2408.15664).
        std: standard deviation of initial weights.
    """

    bias: Tensor | None

    def __init__(self, dim: int, experts: int, choice: Choice, *, biased: bool = False, std: float = 0.02) -> None:
        super().__init__()
        self.choice, self.std = choice, std
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.register_buffer("bias", torch.zeros(experts) if biased else None)

    def initial(self, name: str) -> Init:
        return Init("normal", self.std)

    def reset_buffers(self) -> None:
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Routing:
        """`x [tokens, dim]` → where they go."""
        scores, shares, logits = self.score(x)
        by = self._choose(scores.detach())
        experts = by.topk(self.choice.top_k, dim=-1).indices
        record_choices(self, "experts", lambda: (by, _mask(by, experts)))
        weights = scores.gather(1, experts)
        if self.choice.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * self.choice.scaling, shares, logits)

    def score(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, shares and logits of `x [tokens, dim]`, each `[tokens, experts]` float32."""
        x = x.float()
        if self.choice.jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - self.choice.jitter, 1 + self.choice.jitter)
        logits = F.linear(x, self.weight.float())
        if self.choice.scores == "softmax":
            shares = logits.softmax(-1)
            return shares, shares, logits
        scores = logits.sigmoid()
        return scores, scores / (scores.sum(-1, keepdim=True) + 1e-20), logits

    def _choose(self, scores: Tensor) -> Tensor:
        """What the choice goes by: scores with the bias, −∞ outside the token's groups."""
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


def kept(experts: Tensor, weights: Tensor, limit: int, count: int) -> Tensor:
    """Which of `experts [tokens, top_k]` are among the `limit` of most weight that their expert has, bool."""
    flat = experts.flatten()
    by_weight = weights.flatten().argsort(descending=True, stable=True)
    order = by_weight[flat[by_weight].argsort(stable=True)]
    sizes = loads(experts.view(1, -1), count)[0]
    place = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[flat[order]]
    return torch.empty_like(flat, dtype=torch.bool).index_copy(0, order, place < limit).view_as(experts)


def loads(experts: Tensor, count: int) -> Tensor:
    """Assignments of each of `count` experts in each row of `experts [sets, assignments]`: `[sets, count]` int64."""
    found = torch.zeros(len(experts), count, dtype=torch.int64, device=experts.device)
    return found.scatter_add(1, experts, torch.ones_like(experts))

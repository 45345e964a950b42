"""The module of a layer with experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_train import attach_loss
from forge_train_kit.layers import Layer
from forge_train_kit.model import Linear, TensorStyle, flops_per_token, record_choices

from ..hookspecs import ExpertGroups, TokenDispatch, token_dispatch
from .experts import Experts, Gate, gate_of
from .losses import balance, entropy, z_loss
from .router import Choice, Router, Routing, kept, loads
from .slices import Slices

if TYPE_CHECKING:
    from forge_train import Job

    from ..moe import MoE


def build(config: MoE.Config, layer: Layer, job: Job, *, of: int, groups: ExpertGroups | None = None) -> MoEFeedForward:
    """Build the module of a layer, one of `of` layers with experts, which may be divided into groups."""
    hidden = config.width(layer.ffn_dim)
    router = Router(
        layer.dim,
        config.experts,
        Choice(
            config.top_k,
            scores="sigmoid" if config.router == "sigmoid" else "softmax",
            normalise=config.normalise,
            scaling=config.scaling,
            groups=config.groups,
            top_groups=config.top_groups,
            group_best=config.group_best,
            jitter=config.jitter,
        ),
        biased=config.bias_speed > 0,
        learned=config.bias,
        std=layer.std,
        group=None if groups is None else groups.of_experts,
    )
    experts = Experts(
        config.experts,
        layer.dim,
        hidden,
        gate=gate_of(config),
        matmul=config.matmul,
        std=layer.std,
        output_std=layer.output_std,
        bias=config.bias,
    )
    routed = Routed(
        router,
        experts,
        token_dispatch(job),
        Slices.of(job),
        losses=Losses(config.balance / of, config.z_loss / of, config.balance_over == "sequence"),
        capacity=config.capacity,
        expert_choice=config.router == "expert_choice",
        groups=groups,
    )
    shared = None
    if config.shared:
        shared = SharedExperts(layer, hidden * config.shared, gate_of(config), bias=config.bias)
    return MoEFeedForward(routed, shared, layer.index)


@dataclass(frozen=True)
class Losses:
    """Weights of the auxiliary losses of one layer."""

    balance: float = 0.0
    z: float = 0.0
    by_sequence: bool = False


class MoEFeedForward(nn.Module):
    """Routed experts, and shared ones that every token takes (arXiv:2401.06066)."""

    def __init__(self, routed: Routed, shared: SharedExperts | None, index: int) -> None:
        super().__init__()
        self.routed, self.shared, self.index = routed, shared, index

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, sequence, dim]` → the same."""
        if self.shared is None:
            return self.routed(x)  # type: ignore[no-any-return]
        beside = Overlapped(partial(self.shared, x))
        out: Tensor = self.routed(x, meanwhile=beside)
        return out + beside.result()

    def flops_per_token(self, sequence: int) -> int:
        """Weights of the experts that a token uses."""
        router, experts = self.routed.router, self.routed.experts
        weights = router.weight.numel() + 3 * experts.gate[0].numel() * router.choice.top_k
        if self.shared is not None:
            weights += sum(parameter.numel() for parameter in self.shared.parameters())
        return flops_per_token(sequence, weights=weights)

    def tensor_plan(self) -> dict[str, TensorStyle]:
        """Each rank routes its own tokens; if experts are split too (`parallel.etp`), every rank routes all of them."""
        plan: dict[str, TensorStyle] = {"": "sequence", "routed": "summed" if self.routed.slices.summed else "tokens"}
        return plan if self.shared is None else {**plan, "shared": "tokens"}


@dataclass
class Overlapped:
    """Work that is done once, at any time before its result is needed."""

    work: Any
    done: list[Tensor] = field(default_factory=list)

    def __call__(self) -> None:
        if not self.done:
            self.done.append(self.work())

    def result(self) -> Tensor:
        self()
        return self.done[0]


class SharedExperts(nn.Module):
    """N experts that every token takes equal one of N times the width."""

    def __init__(self, layer: Layer, hidden: int, gate: Gate, *, bias: bool = False) -> None:
        super().__init__()
        self.combine = gate
        self.gate = Linear(layer.dim, hidden, bias=bias, std=layer.std)
        self.up = Linear(layer.dim, hidden, bias=bias, std=layer.std)
        self.down = Linear(hidden, layer.dim, bias=bias, std=layer.output_std)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.combine(self.gate(x), self.up(x)))
        return out


class Routed(nn.Module):
    """Carries tokens to their experts and back, and collects auxiliary losses and statistics.

    Args:
        router: chooses experts for tokens.
        experts: compute the outputs.
        transport: carries rows to experts and back.
        slices: which tokens this rank has, if tensor parallelism splits them.
        losses: weights of the auxiliary losses.
        capacity: most rows per expert in training, as a multiple of the micro-batch's mean; 0 means no limit.
        expert_choice: whether experts choose tokens.
        groups: which tokens may choose which experts; None if all may choose all.
    """

    statistics: Tensor
    looks_ahead = ""
    """Why a token's output depends on later tokens; empty if it does not."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        transport: TokenDispatch,
        slices: Slices,
        *,
        losses: Losses,
        capacity: float = 0.0,
        expert_choice: bool = False,
        groups: ExpertGroups | None = None,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.groups = router, experts, groups
        self.sequence_piece = (0, 1)
        """Index of this rank's piece of each sequence, and number of pieces; set by tensor parallelism."""
        self.count = router.weight.shape[0]
        self.transport, self.slices, self.losses = transport, slices, losses
        self.capacity, self.expert_choice = capacity, expert_choice
        if expert_choice:
            self.looks_ahead = (
                "under moe.router = 'expert_choice' each expert chooses among all tokens of a text, so a token's "
                "output depends on tokens that are not generated yet"
            )
        self.register_buffer("statistics", torch.zeros(self.count + len(MEASURES)), persistent=False)

    def reset_buffers(self) -> None:
        self.statistics.zero_()

    @torch.compiler.disable(reason="how many rows go where depends on data")  # type: ignore[untyped-decorator,no-untyped-call]
    def forward(self, x: Tensor, *, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """`[batch, sequence, dim]` → the same. Not compiled.

        Args:
            x: tokens.
            meanwhile: work that the transport may do while rows are being sent.
        """
        tokens = x.flatten(0, -2)
        if self.expert_choice:
            return self._by_experts(tokens, len(x), meanwhile).view_as(x)
        groups = None if self.groups is None else self.groups.of_tokens(x, self.sequence_piece).flatten()
        return self._by_tokens(tokens, groups, len(x), meanwhile).view_as(x)

    def _by_tokens(self, x: Tensor, groups: Tensor | None, batch: int, meanwhile: Callable[[], None] | None) -> Tensor:
        routing: Routing = self.router(x, groups)
        experts = routing.experts
        if self.capacity and self.training:
            experts = experts.masked_fill(~self._within_capacity(routing, batch), -1)
        rows, sizes, handle = self.transport.dispatch(x, experts, self.count, meanwhile=meanwhile)
        weights = self._with_losses(routing, experts, batch).to(x.dtype)
        return self.transport.combine(self.experts(rows, sizes), weights, handle)

    def _by_experts(self, x: Tensor, batch: int, meanwhile: Callable[[], None] | None) -> Tensor:
        choice = self.router.choice
        scores, shares, logits = self.router.score(x)
        each = min(len(x), self._limit(len(x), self.capacity or 1.0))
        weights, chosen = scores.t().topk(each, dim=1)
        record_choices(
            self,
            "tokens",
            lambda: (scores, torch.zeros_like(scores, dtype=torch.bool).scatter(0, chosen.t(), True)),
            among="tokens",
        )
        tokens, weights = chosen.flatten(), weights.flatten()
        if choice.normalise:
            totals = weights.new_zeros(len(x)).index_add(0, tokens, weights)
            weights = weights / (totals[tokens] + 1e-20)
        experts = torch.arange(self.count, device=x.device).repeat_interleave(each).unsqueeze(1)
        rows, sizes, handle = self.transport.dispatch(x[tokens], experts, self.count, meanwhile=meanwhile)
        routing = Routing(experts, weights.unsqueeze(1) * choice.scaling, shares, logits)
        weights = self._with_losses(routing, experts, batch).to(x.dtype)
        out = self.transport.combine(self.experts(rows, sizes), weights, handle)
        return torch.zeros_like(x).index_add(0, tokens, out)

    def _limit(self, tokens: int, capacity: float) -> int:
        """Rows of a micro-batch that one expert takes, if this rank has `tokens` tokens of it."""
        return math.ceil(capacity * tokens * self.slices.count * self.router.choice.top_k / self.count)

    def _within_capacity(self, routing: Routing, batch: int) -> Tensor:
        """Choose the assignments to keep: over the whole micro-batch, even if this rank has only a slice of it."""
        experts, weights = self.slices.gather(routing.experts), self.slices.gather(routing.weights.detach())
        limit: int | Tensor = self._limit(len(routing.experts), self.capacity)
        if self.groups is not None:
            limit = (self.capacity * self.router.mean_loads(loads(experts.view(1, -1), self.count)[0].float())).ceil()
        stays = kept(experts, weights, limit, self.count)

        def made() -> tuple[Tensor, Tensor]:
            chosen, by, taken = (self.slices.in_order(one, batch) for one in (experts, weights, stays))
            scores = by.new_full((len(by), self.count), -math.inf)
            return scores.scatter(1, chosen, by), torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, taken)

        record_choices(self, "tokens within the capacity", made, among="tokens")
        return self.slices.own(stays)

    def _with_losses(self, routing: Routing, taken: Tensor, batch: int) -> Tensor:
        """The weights, with the auxiliary losses attached; also counts the step's statistics."""
        sets = batch if self.losses.by_sequence else 1
        own = loads(routing.experts.view(sets, -1), self.count)
        even = balance(self.slices.add(own), routing, self.slices.count, self.router) if self.losses.balance else None
        value = self.losses.z * z_loss(routing) if self.losses.z else None
        if even is not None:
            value = self.losses.balance * even + (0.0 if value is None else value)
        if self.training and not _recomputing():
            self._count(routing, taken, own, even)
        return routing.weights if value is None else attach_loss(routing.weights, value / self.slices.copies)

    @torch.no_grad()
    def _count(self, routing: Routing, taken: Tensor, own: Tensor, even: Tensor | None) -> None:
        measured = {
            "tokens": len(routing.logits),
            "balance": 0.0 if even is None else even,
            "entropy": entropy(routing.shares),
            "dropped": (taken < 0).sum(),
            "broken": (~routing.logits.isfinite()).any(),
        }
        numbers = [
            value.float() if isinstance(value := measured[name], Tensor) else self.statistics.new_full((), value)
            for name in MEASURES  # copying a number to the device would wait for it
        ]
        self.statistics += torch.cat([own.sum(0).float(), torch.stack(numbers)])


MEASURES = ("tokens", "balance", "entropy", "dropped", "broken")
"""Sums over tokens that a layer counts besides the load of each expert."""


def _recomputing() -> bool:
    """Return True if this forward is a recomputation in a backward pass, so that statistics are not counted twice."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1

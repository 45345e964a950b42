"""An optimizer whose updates are functions of full matrices, however they are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_train.mesh.tensors import local

from .at_rest import MASTER, AtRest
from .exchange import Message, Piece, Traffic, group_of
from .matrices import Box, Matrix, matrices_of, regions, sharded_axes, stacked
from .owners import batches, exchanges, split_local
from .update_rule import UpdateRule, state_beside, state_piece
from .updating import UpdatingOptimizer


@dataclass
class _Held:
    """A parameter in this step: its local part, gradient and momentum `[stack, rows, columns]`, and its group."""

    weight: Tensor
    gradient: Tensor | None
    momentum: Tensor | None
    """The momentum if it is fp32; a narrow one has been updated already."""
    group: Mapping[str, Any]
    random: tuple[object, ...] = ()
    """The key of the random bits for rounding."""


class MatrixOptimizer(UpdatingOptimizer):
    """Momentum, decoupled weight decay and a rule over full matrices:

    m ← β m + (1 − β) g;  u = rule((1 − β) g + β m, or m);  θ ← θ − lr λ θ − lr factor u

    Each matrix that several ranks hold is gathered by one of them, its owner, which sends the update back. Owners are
    balanced by the cost of their matrices. All ranks take part in rounds; in each round an owner gathers no more than
    the size of the largest matrix, and a round is two all-to-alls. Replicas of a matrix compute the same update
    separately.

    Args:
        groups: parameter groups of matrices `[rows, columns]` and of stacks `[stack, rows, columns]`, with `lr`,
            `weight_decay`, `momentum` and `nesterov`.
        rule: computes the updates of matrices.
        rest: the optimizer of all other parameters. Its groups and its state become part of this one's.
        rank: global rank of this process.
        device: where the rule computes.
        fused: id of a parameter → rows of the matrices stacked in it (`fused_rows`).
        at_rest: how momenta and bf16 parameters are stored between steps.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        rule: UpdateRule,
        *,
        rest: torch.optim.Optimizer | None = None,
        rank: int = 0,
        device: torch.device | str = "cpu",
        fused: Mapping[int, Sequence[int]] | None = None,
        at_rest: AtRest | None = None,
    ) -> None:
        matrices = list(groups)
        super().__init__([*matrices, *(rest.param_groups if rest else ())], {})
        self._count, self._rest = len(matrices), rest
        self.rule, self._rank, self._device, self.at_rest = rule, rank, device, at_rest
        fused = fused or {}
        self._parameters = [p for group in matrices for p in group["params"]]
        self._parts = [max(1, len(fused.get(id(p), ()))) for p in self._parameters]
        self._regions = {index: regions(p, rank) for index, p in enumerate(self._parameters)}
        everything = [
            matrix
            for index, p in enumerate(self._parameters)
            for matrix in matrices_of(index, p.shape, fused.get(id(p), ()))
        ]
        own, shared = split_local(everything, self._regions, rank)
        # The largest part on any rank: ranks with uneven parts must agree on the rounds of an exchange.
        stacks = [
            box.numel
            for index, p in enumerate(self._parameters)
            if p.ndim == 3
            for box in self._regions[index].values()
        ]
        room = max([*stacks, *(matrix.box.numel for matrix in everything)], default=0)
        self._batches = batches(own, room)
        self._traffic = [
            Traffic.of(exchange, self._regions, rank, self._pieces, group_of(exchange.ranks, self._a_mesh(exchange)))
            for exchange in exchanges(shared, self._regions, room)
        ]
        self._held: list[_Held] = []

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        return saved if self.at_rest is None else self.at_rest.opened(saved, self.param_groups)

    def _a_mesh(self, exchange: Any) -> tuple[Any, list[int]]:
        """A mesh of the ranks of an exchange, and the axes along which they differ."""
        first = next(m for ranks in exchange.rounds[0].owned for m in ranks)
        parameter: Any = self._parameters[first.parameter]
        return parameter.device_mesh, sharded_axes(parameter)

    def update(self) -> None:
        self._held = [held for group in self.param_groups[: self._count] for held in self._hold(group)]
        for index, held in enumerate(self._held):
            for name in self.rule.keeps if held.gradient is not None else ():
                self._keep(index, name)  # on ranks without a part of it too: all of them save it
        for batch in self._batches:
            self._update_own([matrix for matrix in batch if self._held[matrix.parameter].gradient is not None])
        for traffic in self._traffic:
            for there, back in traffic.rounds:
                self._update_shared(traffic, there, back)
        for parameter, held in zip(self._parameters, self._held, strict=True):
            if held.gradient is not None and MASTER in self.state[parameter]:
                parameter.copy_(self.state[parameter][MASTER])
        self._held = []
        if self._rest is not None:
            self._rest.param_groups, self._rest.state = self.param_groups[self._count :], self.state
            self._rest.step()

    def _hold(self, group: Mapping[str, Any]) -> Iterator[_Held]:
        """The parameters of a group in this step."""
        for parameter in group["params"]:
            if parameter.grad is None:
                yield _Held(stacked(local(parameter)), None, None, group)
                continue
            state, kept = self.state[parameter], self.at_rest
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32 if kept else None)
            gradient = local(_placed_as(parameter, parameter.grad))
            if kept is None:
                yield _Held(stacked(local(parameter)), stacked(gradient), stacked(local(state["momentum"])), group)
                continue
            # One parameter at a time, in the same order on all ranks, which may have to agree on scales.
            kept.widen(state, parameter)
            local(state["momentum"]).lerp_(gradient.float(), 1 - group["momentum"])
            random = kept.narrow(state, parameter)
            yield _Held(stacked(local(kept.weight(state, parameter))), stacked(gradient), None, group, random)

    def _update_own(self, batch: Sequence[Matrix]) -> None:
        """Matrices of one shape that this rank holds in full."""
        if not batch:
            return
        momentum = _joined([self._momentum(matrix.parameter, matrix.box).to(self._device) for matrix in batch])
        views = {name: [self._state(piece) for piece in self._state_pieces(batch, name)] for name in self.rule.keeps}
        state = {name: _joined([view.to(self._device) for view in parts]) for name, parts in views.items()}
        update = self._direction(momentum, state)
        counts = [matrix.box.shape[0] for matrix in batch]
        for matrix, part in zip(batch, torch.split(update, counts), strict=True):
            self._move(matrix, matrix.box, part)
        for name, parts in views.items():
            for view, new in zip(parts, torch.split(state[name], counts), strict=True):
                if view.data_ptr() != new.data_ptr():
                    view.copy_(new)

    def _update_shared(self, traffic: Traffic, there: Message, back: Message) -> None:
        """A round: gather this rank's own matrices, compute, and send back. Each buffer is freed before the next."""
        sizes = self._sizes
        received = traffic.send(self._packed(there), there, back, sizes)
        full = back.gather(received, self._device, sizes)
        del received
        for shape in full:
            full[shape][""] = self._direction(full[shape].pop(""), full[shape])
        answer = back.buffer(self._device, sizes)
        back.scatter(full, answer, sizes)
        del full
        returned = traffic.send(answer, back, there, sizes)
        del answer
        for piece, part in there.parts(returned, sizes):
            if self._held[piece.matrix.parameter].gradient is None:
                continue
            if piece.name:
                self._state(piece).copy_(part)
            else:
                self._move(piece.matrix, piece.box, part)

    def _packed(self, there: Message) -> Tensor:
        """The parts that this rank holds of matrices that other ranks own."""
        buffer = there.buffer(self._device, self._sizes)
        for piece, part in there.parts(buffer, self._sizes):
            if not piece.name:
                part.copy_(self._momentum(piece.matrix.parameter, piece.box))
            elif self._held[piece.matrix.parameter].gradient is not None:
                part.copy_(self._state(piece))
            else:
                part.zero_()
        return buffer

    def _sizes(self, name: str) -> torch.dtype:
        return torch.float32 if name else self.rule.dtype

    def _direction(self, momentum: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return self.rule.direction(momentum, state).to(self.rule.dtype)

    def _momentum(self, index: int, box: Box) -> Tensor:
        """Update a part of the momentum; returns a copy of the rule's input. Part by part, while it is cached."""
        held, origin = self._held[index], self._regions[index][self._rank]
        if held.gradient is None:
            return held.weight.new_zeros(box.shape)
        gradient, decay = box.of(held.gradient, origin), held.group["momentum"]
        if held.momentum is not None:
            momentum = box.of(held.momentum, origin).lerp_(gradient, 1 - decay)
            return torch.lerp(gradient, momentum, decay) if held.group["nesterov"] else momentum.clone()
        assert self.at_rest is not None
        parameter = self._parameters[index]
        momentum = self.at_rest.part(self.state[parameter], "momentum", parameter, box, origin)
        return momentum.lerp_(gradient.float(), 1 - decay) if held.group["nesterov"] else momentum

    def _move(self, matrix: Matrix, box: Box, update: Tensor) -> None:
        held, origin = self._held[matrix.parameter], self._regions[matrix.parameter][self._rank]
        lr, decay = held.group["lr"], held.group["weight_decay"]
        weight = box.of(held.weight, origin)
        wide = weight.float() if held.random else weight
        wide.mul_(1 - lr * decay).add_(update.to(wide.device), alpha=-lr * self.rule.factor(*matrix.box.shape[1:]))
        if wide is not weight and self.at_rest is not None:
            weight.copy_(self.at_rest.rounded_part(wide, self._parameters[matrix.parameter], box, held.random))

    # -- the rule's state ---------------------------------------------------------------------------------------------

    def _pieces(self, matrix: Matrix, region: Box) -> list[Piece]:
        """Return what a rank with this region of a parameter holds of a matrix: its momentum, and the rule's state."""
        part = matrix.box & region
        if not part.numel:
            return []
        return [Piece(matrix, "", part, matrix.box)] + [
            state_piece(matrix, name, kept, part) for name, kept in self.rule.keeps.items()
        ]

    def _state_pieces(self, batch: Sequence[Matrix], name: str) -> list[Piece]:
        return [state_piece(matrix, name, self.rule.keeps[name], matrix.box) for matrix in batch]

    def _state(self, piece: Piece) -> Tensor:
        """This rank's part of the rule's state."""
        part, box = self._keep(piece.matrix.parameter, piece.name)
        return piece.box.of(part, box)

    def _keep(self, index: int, name: str) -> tuple[Tensor, Box]:
        """This rank's part of the rule's state for a whole parameter, and its place."""
        parameter, region = self._parameters[index], self._regions[index][self._rank]
        known, kept = self.state[parameter], self.rule.keeps[name]
        known[name], part, box = state_beside(parameter, known.get(name), kept, region, self._parts[index])
        return part, box


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _placed_as(parameter: Any, gradient: Any) -> Any:
    placements = getattr(parameter, "placements", None)
    same = placements is None or gradient.placements == placements
    return gradient if same else gradient.redistribute(placements=placements)

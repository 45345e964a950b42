"""One process on a layout's path: at each step it computes gradients of its own, and is then given the layout's.

Its weights stay those of the layout, so that later gradients, the optimizer and an evaluation can be compared as
sharply as the first gradients: rounding errors do not grow from step to step, and no tie or precision comes between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_train.base.errors import PluginError
from forge_train.contract.events import Update
from forge_train.loop.resume import restore
from forge_train.loop.weights import compare_shapes
from forge_train.mesh.tensors import gradients_of
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train.step.step import total_norm
from forge_train_kit.stored import places

from .numbers import errors, typical
from .numbers import norm as norm_of
from .record import watching
from .recording import Record, Recording, read_gradients
from .states import StateApart, states_apart
from .updates import UPDATE, Moved, moves, settings
from .verdict import Offender
from .watched import PLUGINS, Watched


@dataclass
class FollowedStep:
    """A step's gradients on both sides, from equal weights."""

    differ: list[Offender]
    """All of them, the worst first."""
    norm: tuple[float, float]
    """Of the layout's gradients: as one process computes it, and as the layout did."""
    finite: tuple[bool, bool] = (True, True)
    """True if gradients are finite: those of one process, and the layout's."""
    own: float = 0.0
    """Typical error of one process against one in fp32."""
    apart: float = 0.0
    """The same of the layout."""


@dataclass
class Followed:
    """Findings of one process that followed a layout."""

    record: Record = field(default_factory=lambda: Record(0, 0))
    steps: list[FollowedStep] = field(default_factory=list)
    training_loss: float | None = None
    """Of the held-out sequences, in training mode."""
    loaded: dict[str, str] = field(default_factory=dict)
    """Hashes of what one process loads from the layout's checkpoint."""
    updates: list[Moved] = field(default_factory=list)
    """Every weight and every tensor of the optimizer's state, the worst first."""
    states: list[StateApart] = field(default_factory=list)
    """Everything in the states of plugins, the worst first."""
    position: tuple[int, int] = (0, 0)
    """Sequences that training has used: of one process, and as the layout's checkpoint says."""
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings of the optimizer that differ."""
    decay: float = 0.0
    """The share of itself that a weight loses to weight decay in all steps, as parameter groups say."""
    clipped_by_rank: bool = False
    """True if the optimizer arrives there when each rank clips its pieces by a norm of their own."""
    unclipped: bool = False
    """True if the optimizer arrives at the layout's weights without clipping."""


def follow(
    setup: Setup,
    folder: Path,
    layout: Recording,
    *,
    exact: Path | None = None,
    unclipped: Callable[[], Setup] | None = None,
) -> Followed:
    """Take a layout's steps on this process, and load its checkpoint.

    Args:
        setup: the configuration of one process.
        folder: what the layout has left.
        layout: its recording.
        exact: where `follow_exactly` left gradients, if it did.
        unclipped: the configuration without clipping.
    """
    steps = len(layout.first.losses)
    with watching(_Following, setup, folder / "followed") as one:
        one.source, one.exact = folder, exact
        saved = folder / "checkpoint"  # of another model, it has gradients that don't fit either
        compare_shapes(saved, one.model.state_dict(), one.job.dist, places(saved, one.job.dist))
        start = {name: _kept(parameter) for name, parameter in one.model.named_parameters()}
        one.take(steps)
        found = Followed(one.seen, one.steps, one.training_loss, decay=one.decay)
        tensors, rest = one.tensors()
        mine, at = {name: _kept(tensor) for name, tensor in tensors.items()}, one.position
        restore(one.stepper, one.progress, folder / "checkpoint", one.weights)
        theirs, other = one.tensors()
        found.loaded, found.position = one.hashes(), (at, one.position)
        theirs = {name: _kept(tensor) for name, tensor in theirs.items()}
        found.updates = moves(start, mine, theirs, steps, layout.ranks)
        found.settings = settings(rest["optimizer"], other["optimizer"])
        found.states = states_apart(
            (mine, rest[PLUGINS]), (theirs, other[PLUGINS]), but=one.job.hooks.provider("build_data")
        )
    if _beyond(found.updates) and unclipped and setup.config.train.clip_norm:
        with watching(_Replaying, unclipped(), folder / "unclipped") as free:
            free.source = folder
            with suppress(PluginError):  # of a plugin that asks in on_gradients for what only a step's batches bring
                free.take(steps)
                found.unclipped = not _beyond(moves(start, _ends(free), theirs, steps))
        if not found.unclipped and any(rank.pieces != layout.first.pieces for rank in layout.ranks):
            with watching(_ClippingByRank, unclipped(), folder / "by-rank") as apart, suppress(PluginError):
                apart.source, apart.ranks, apart.limit = folder, layout.ranks, setup.config.train.clip_norm
                apart.take(steps)
                found.clipped_by_rank = not _beyond(moves(start, _ends(apart), theirs, steps))
    return found


def follow_exactly(setup: Setup, folder: Path, layout: Recording, leave: Path) -> Record:
    """The same in fp32 and without plugins that round, for its gradients, which are left, and its evaluation."""
    leave.mkdir(parents=True)
    with watching(_Following, setup, folder / "exactly", rounding=False) as one:
        one.source, one.left = folder, leave
        one.take(len(layout.first.losses))
        return one.seen


def _ends(one: Watched) -> dict[str, Tensor]:
    return {name: _kept(tensor) for name, tensor in one.tensors()[0].items()}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def _beyond(updates: Sequence[Moved]) -> list[Moved]:
    return [one for one in updates if not one.error <= UPDATE]


class _Following(Watched):
    """Goes a layout's way."""

    source: Path
    exact: Path | None = None
    """Gradients left by an exact follower."""
    left: Path | None = None
    """Place for this follower's own gradients."""
    training_loss: float | None = None
    decay = 0.0

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.steps: list[FollowedStep] = []

    def on_backward(self, update: Update) -> Update:
        update, step = super().on_backward(update), update.step
        own = {name: p.grad.cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        given, norm = read_gradients(self.source, step)
        finite = bool(update.grad_norm.isfinite()), bool(norm.isfinite())
        overflow = not (all(finite) if self.job.config.train.precision == "fp16" else finite[1])
        if self.left is not None:
            torch.save(own, self.left / f"{step}.pt")
        found = FollowedStep([] if overflow else errors(own, given), (0.0, 0.0), finite)
        if self.exact and not overflow:
            exact = torch.load(self.exact / f"{step}.pt", weights_only=True, mmap=True)
            found.own, found.apart = typical(errors(exact, own)), typical(errors(exact, given))
        put(self.model.named_parameters(), given)
        found.norm = float(total_norm(gradients_of(update.parameters), self.job.dist)), float(norm)
        self.steps.append(found)
        self._update = _given(update, norm.to(self.job.device))
        return self._update

    def leave(self, update: Update, present: Mapping[str, Tensor]) -> None:
        pass  # of one's own gradients

    def evaluate(self) -> None:
        super().evaluate()
        held_out = self.stepper.held_out
        assert held_out is not None
        held_out.load_state_dict(self.held_out_start)
        batches, counts = self.stepper.fetch(held_out, self.stepper.accumulation)
        self.training_loss = float(self.stepper.executor.train(batches, 0.0)) / (counts.weight or 1.0)
        self.model.after_backward()
        self.optimizer.zero_grad(set_to_none=True)

    def on_update(self, update: Update) -> None:
        groups = self.optimizer.param_groups
        self.decay += max(float(group["lr"]) * float(group.get("weight_decay", 0.0)) for group in groups)


class _Replaying(_Following):
    """Has the optimizer alone go a layout's way: no data, no model, no plugin that follows steps."""

    def take(self, steps: int) -> None:
        zero = torch.zeros((), device=self.job.device)
        for step in range(1, steps + 1):
            given, norm = read_gradients(self.source, step)
            put(self.model.named_parameters(), self.changed(given))
            update = Update(step, zero, zero, self.stepper.parameters)
            self.stepper.finish(_given(update, norm.to(self.job.device)))
            self.progress.step = step

    def changed(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients that the optimizer gets."""
        return gradients


class _ClippingByRank(_Replaying):
    """Clips what each rank holds by the norm of that alone."""

    ranks: Sequence[Record] = ()
    limit = 0.0

    def changed(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name: gradient.clone() for name, gradient in gradients.items()}
        for rank in self.ranks:
            places = {
                name: tuple(slice(first, end) for first, end in piece)
                for name, piece in rank.pieces.items()
                if name in gradients
            }
            held = norm_of(gradients[name][place] for name, place in places.items())
            for name, place in places.items():
                found[name][place] = gradients[name][place] * min(1.0, self.limit / (held + 1e-6))
        return found


def put(parameters: Iterable[tuple[str, Tensor]], gradients: Mapping[str, Tensor]) -> None:
    """Give parameters these gradients; one of another shape is as good as none."""
    for name, parameter in parameters:
        gradient = gradients.get(name)
        if gradient is None or gradient.shape != parameter.shape:
            parameter.grad = None
        else:
            parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)


def _given(update: Update, norm: Tensor) -> Update:
    """The update as the layout had it, with the norm that it clipped by. One that is no number is left out: a layout
    leaves it out too, or is no use."""
    update = replace(update, grad_norm=norm)
    if not math.isfinite(float(norm)):
        update.veto("the gradients are not finite")
    return update

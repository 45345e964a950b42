"""One micro-batch: what the model is given, what the task compares it with, and how plugins prepare it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .cuts import ROWS, TOKENS, Axes, Leaf, Replicate, Span, Spec
from .micro_state import MicroState

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MASKED = -100
"""The label of a position that is not trained on."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank: inputs of the model, and targets of the task, which the model never sees.

    Everything is cut along its own axes. `axes` names those of labels, extras and targets where they differ from what
    is taken for granted: labels are `[batch, sequence, …]`, or `[batch]` if they have one axis; extras and targets are
    `[batch, …]`, without an axis of positions.
    """

    inputs: Tensor
    """Token ids, `[batch, sequence]` int64."""
    labels: Tensor
    """Targets that the task compares outputs with: the next token at each position, `[batch, sequence]` int64, where
    −100 is masked; a class for each sequence, `[batch]`; a distribution at each position, `[batch, sequence, k]`; …"""
    position_ids: Tensor | None = None
    """Position of each token in its document or its row, whichever began later, `[batch, sequence]` int64."""
    document_ids: Tensor | None = None
    """Document number of each token within its row, `[batch, sequence]` int64: attention stays inside a document."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """More inputs of the model (images, …), which gets each as a keyword argument of its name."""
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    """More of what the task compares outputs with (weights, rewards, a teacher's logits)."""
    axes: Mapping[str, Axes] = field(default_factory=dict)
    """`labels`, or the name of an extra or a target → its axes."""
    state: MicroState = field(default_factory=MicroState)
    """State that plugins keep for this micro-batch during a step."""

    def model_inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward beside the token ids; what is None is left out."""
        known = {"position_ids": self.position_ids, "document_ids": self.document_ids}
        return {name: value for name, value in {**known, **self.extras}.items() if value is not None}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {"inputs": self.inputs, "labels": self.labels, **self.model_inputs(), **self.targets}

    def axes_of(self, name: str) -> Axes:
        """The axes of one of `tensors()`."""
        if name in self.axes:
            return self.axes[name]
        if name == "labels":
            return TOKENS if self.labels.dim() > 1 else ROWS
        return ROWS if name in self.extras or name in self.targets else TOKENS

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch of changed tensors."""
        new: dict[str, Any] = {
            name: change(tensor)
            for name in ("inputs", "labels", "position_ids", "document_ids")
            if (tensor := getattr(self, name)) is not None
        }
        for group in ("extras", "targets"):
            new[group] = {name: change(tensor) for name, tensor in getattr(self, group).items()}
        return replace(self, **new, state=self.state.map(change))

    def spec(
        self,
        axis: Literal["batch", "sequence"],
        sizes: Sequence[int] | None = None,
        spans: Sequence[Sequence[Span]] | None = None,
    ) -> Spec:
        """Return the spec by which `shard_tree` splits each tensor along an axis; tensors without it are replicated.

        Args:
            axis: of sequences, or of positions.
            sizes: see `Split`.
            spans: see `Split`.
        """

        def one(axes: Axes) -> Leaf:
            return axes.along(axis, sizes, spans)

        own = {name: one(self.axes_of(name)) for name in ("inputs", "labels", "position_ids", "document_ids")}
        more = {
            group: {name: one(self.axes_of(name)) for name in getattr(self, group)} for group in ("extras", "targets")
        }
        return {**own, **more, "axes": Replicate(), "state": self.state.spec(one)}

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; copies from pinned memory do not wait."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def problem(self) -> str:
        """Describe an error in names, axes or shapes; empty if there is none."""
        return next(self._problems(), "")

    def _problems(self) -> Iterator[str]:
        own = {"inputs", "labels", "position_ids", "document_ids"}
        if twice := sorted((self.extras.keys() & self.targets.keys()) | (own & {*self.extras, *self.targets})):
            yield f"two of its tensors are named {twice[0]!r}"
        if unknown := sorted(self.axes.keys() - {"labels", *self.extras, *self.targets}):
            yield f"`axes` names {unknown[0]!r}, which is none of labels, extras and targets"
        if self.inputs.dim() < 2:
            yield f"inputs must be [batch, sequence], found {list(self.inputs.shape)}"
            return
        if not self.inputs.numel():
            yield f"inputs are {list(self.inputs.shape)}: there is no token"
        for name, tensor in self.tensors().items():
            axes = self.axes_of(name)
            for axis, dim, size in (
                ("batch", axes.batch, self.inputs.shape[0]),
                ("sequence", axes.sequence, self.inputs.shape[1]),
            ):
                if dim is not None and (tensor.dim() <= dim or tensor.shape[dim] != size):
                    yield (
                        f"{name!r} is {list(tensor.shape)}, and its {axis} axis is said to be {dim}, of {size}: "
                        f"say which it is with Batch(axes={{{name!r}: Axes(batch=…, sequence=…)}})"
                    )


class BatchPhase(enum.IntEnum):
    """Phase in which a batch is changed. A plugin chooses a phase, never a position between phases."""

    MAKE = 10
    """Tensors are made or replaced."""
    MASK = 20
    """Labels are masked, targets weighted."""
    SLICE = 30
    """Each rank keeps its own part of every sequence."""


@dataclass(frozen=True, slots=True)
class PrepareBatch:
    """A change of every micro-batch, on the CPU, at its place in the order of phases."""

    phase: BatchPhase
    apply: Callable[[Batch], Batch]


@dataclass(frozen=True, slots=True)
class PrepareStep:
    """A look at all micro-batches of this rank in a step, of whole sequences, before any of them is cut or computed.

    They went through the phases before `SLICE`. What it writes to `job.step_state` is cut with them. It is called in an
    evaluation too, for each global batch; data-parallel ranks call it equally often, so it may communicate.
    """

    apply: Callable[[Sequence[Batch]], None]


Preparation: TypeAlias = PrepareBatch | PrepareStep

"""One micro-batch: the model's inputs, the task's targets, and the functions by which plugins prepare it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..base.errors import PluginError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MASKED = -100
"""The label of a position that is not trained on."""


@dataclass(frozen=True, slots=True)
class Axes:
    """Axes of a tensor that index sequences and positions."""

    batch: int | None = 0
    sequence: int | None = None


TOKENS = Axes(batch=0, sequence=1)
ROWS = Axes(batch=0)
_OWN = {
    "inputs": TOKENS,
    "labels": TOKENS,
    "position_ids": TOKENS,
    "document_ids": TOKENS,
    "sample_ids": ROWS,
    "positions": Axes(batch=None, sequence=0),
}
"""Field that holds a tensor → its axes; those of labels may differ."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank: inputs of the model, and targets of the task, which the model's forward never gets.

    Every tensor is cut along its own axes. `axes` names those of labels, extras and targets where they differ from the
    defaults: labels are `[batch, sequence, …]`, or `[batch]` if they have one axis; extras and targets are
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
    """More tensors for the task and for modules inside the model (weights, rewards, a teacher's logits), by name."""
    axes: Mapping[str, Axes] = field(default_factory=dict)
    """`labels`, or the name of an extra or a target → its axes."""
    sample_ids: Tensor | None = None
    """The number of each sequence in the stream of all training data, `[batch]` int64: the same on every layout, and
    never repeated in a run. The loop sets it where the loader did not."""
    positions: Tensor | None = None
    """Positions of a slice within the whole rows, `[sequence]` int64; None if rows are whole. `slice` sets it."""
    intermediates: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that a task or a module records while the micro-batch is computed, by name. They stay on their rank until
    the step ends. A tensor keeps its graph: detach it if it is only read."""

    def model_inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward beside the token ids; what is None is left out."""
        known = {"position_ids": self.position_ids, "document_ids": self.document_ids}
        return {name: value for name, value in {**known, **self.extras}.items() if value is not None}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, but the intermediates."""
        own = {name: tensor for name in _OWN if (tensor := getattr(self, name)) is not None}
        return {**own, **self.extras, **self.targets}

    def axes_of(self, name: str) -> Axes:
        """The axes of one of `tensors()`."""
        if name in self.axes:
            return self.axes[name]
        if name == "labels" and self.labels.dim() == 1:
            return ROWS
        return _OWN.get(name, ROWS)

    def with_targets(self, targets: Mapping[str, Tensor], axes: Axes = ROWS) -> Batch:
        """The same batch with more targets, which all have the same axes.

        Args:
            targets: by name, by custom `plugin.name`.
            axes: `Axes(batch=0, sequence=1)` for a value at each position, `Axes(batch=None)` for a value of the whole
                micro-batch.
        """
        return replace(self, targets={**self.targets, **targets}, axes={**self.axes, **dict.fromkeys(targets, axes)})

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch of changed tensors."""
        made = self._changed(lambda name, tensor: change(tensor))
        return replace(made, intermediates={name: change(tensor) for name, tensor in self.intermediates.items()})

    def slice(self, axis: Literal["batch", "sequence"], *spans: tuple[int, int]) -> Batch:
        """The sequences or the positions of some spans, in their order; tensors without that axis stay whole.

        A part of one span shares the tensors' memory. It has intermediates of its own.

        Args:
            axis: `batch` selects sequences, `sequence` positions.
            spans: `(start, stop)` each. Context parallelism gives a rank one from the front of a row and one from its
                end.

        Raises:
            PluginError: if the batch is inconsistent or the spans lie outside it.
        """
        import torch

        if axis not in ("batch", "sequence"):
            raise PluginError(f"A batch is cut along its axis 'batch' or 'sequence', not {axis!r}.")
        if text := self.problem():
            raise PluginError(f"A batch that does not fit together can't be cut: {text}.")
        length = self.inputs.shape[axis == "sequence"]
        if not spans or any(not 0 <= start <= stop <= length for start, stop in spans):
            raise PluginError(f"Batch.slice({axis!r}) takes spans (start, stop) within 0 and {length}, found {spans}.")

        def cut(name: str, tensor: Tensor) -> Tensor:
            axes = self.axes_of(name)
            dim = axes.batch if axis == "batch" else axes.sequence
            if dim is None:
                return tensor
            pieces = [tensor.narrow(dim, start, stop - start) for start, stop in spans]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

        whole = self
        if axis == "sequence" and self.positions is None:
            whole = replace(self, positions=torch.arange(length, device=self.inputs.device))
        return whole._changed(cut)

    def _changed(self, change: Callable[[str, Tensor], Tensor]) -> Batch:
        own: dict[str, Any] = {
            name: change(name, tensor) for name in _OWN if (tensor := getattr(self, name)) is not None
        }
        extras, targets = (
            {name: change(name, tensor) for name, tensor in group.items()} for group in (self.extras, self.targets)
        )
        return replace(self, **own, extras=extras, targets=targets, intermediates={})

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; copies from pinned memory do not wait."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def problem(self) -> str:
        """Describe an error in names, axes or shapes; empty if there is none."""
        return next(self._problems(), "")

    def _problems(self) -> Iterator[str]:
        if twice := sorted((self.extras.keys() & self.targets.keys()) | (_OWN.keys() & {*self.extras, *self.targets})):
            yield f"two of its tensors are named {twice[0]!r}"
        if unknown := sorted(self.axes.keys() - {"labels", *self.extras, *self.targets}):
            yield f"`axes` names {unknown[0]!r}, which is none of labels, extras and targets"
        if self.inputs.dim() < 2:
            yield f"inputs must be [batch, sequence], found {list(self.inputs.shape)}"
            return
        if not self.inputs.numel():
            yield f"inputs are {list(self.inputs.shape)}: there is no token"
        for name, tensor in self.tensors().items():
            axes, dims = self.axes_of(name), tensor.dim()
            for axis, dim, size in (
                ("batch", axes.batch, self.inputs.shape[0]),
                ("sequence", axes.sequence, self.inputs.shape[1]),
            ):
                if dim is not None and (not -dims <= dim < dims or tensor.shape[dim] != size):
                    yield (
                        f"{name!r} is {list(tensor.shape)}, and its {axis} axis is said to be {dim}, of {size}: "
                        f"say which it is with Batch(axes={{{name!r}: Axes(batch=…, sequence=…)}})"
                    )


Direction = Literal["both", "forward", "backward", "input", "weight"]
"""`both`: the backward pass follows the forward pass at once. A pipeline tells them apart, and may split the backward
pass of a part into that of its `input` and that of its `weight`s."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch that is about to pass through a part of the model."""

    last: bool
    """True if no later micro-batch of the step passes through this part in this direction; for a backward pass, if no
    later one computes gradients of weights."""
    part: int = 0
    """Index of the part on this rank."""
    direction: Direction = "both"
    batch: Batch | None = None
    """The micro-batch itself, if the executor says which it is."""


@dataclass(eq=False)
class CurrentStep:
    """The step under way: `job.step`. It lasts from the first forward pass until `on_step` has returned; in an
    evaluation, each global batch is a step."""

    batches: Sequence[Batch] = ()
    """This rank's micro-batches, on the device; none outside a step."""
    batch: Batch | None = None
    """The micro-batch that passes through the model, forward or backward, for modules, which are not given it. None
    outside a step (text is generated), and if the executor does not say which it is."""

    def __deepcopy__(self, _: object) -> CurrentStep:
        """A copied module shares it with the original."""
        return self

    def passes(self, micro: MicroBatch) -> None:
        """A micro-batch begins to pass through the model; the loop calls this."""
        self.batch = micro.batch

    def end(self) -> None:
        """Release the batches; the loop calls this."""
        self.batches, self.batch = (), None


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
    """A change of all micro-batches of this rank in a step, of whole sequences, after the phases before `SLICE`.

    It returns as many batches as it is given. `batch.with_targets` adds tensors, which are cut with the batch. An
    evaluation calls it too, for each global batch. Data-parallel ranks call it equally often, so it may communicate.
    """

    apply: Callable[[Sequence[Batch]], Sequence[Batch]]


Preparation: TypeAlias = PrepareBatch | PrepareStep

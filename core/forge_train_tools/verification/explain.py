"""Wrong gradients as a sum of right ones: which micro-batch is missing or counts twice, or what is left unreduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forge_train.base.format import format_list
from forge_train.contract.batch import Batch
from forge_train.contract.protocols import Executor
from forge_train.registry.setup import Setup

from .numbers import norm
from .patterns import group
from .record import watching
from .recording import Recording
from .watched import Watched

FIT = 1e-3
"""Relative remainder below which a gradient counts as explained."""
SURE = 0.01
"""Distance from 1 at which a share counts as wrong."""
MEMORY = 2**31
"""Bytes of gradients to hold for it at once."""


@dataclass(frozen=True)
class Explanation:
    """Weight of each part of a step in a layout's first gradients."""

    shares: tuple[float, ...]
    """Of each micro-batch, in the order of the global stream."""
    attached: float
    """Of the losses that the model attaches, beyond what their micro-batches count."""
    data_ranks: int

    def __str__(self) -> str:
        wrong = [(at, share) for at, share in enumerate(self.shares) if abs(share - 1) > SURE]
        if not wrong:
            return (
                f"Losses that the model attaches (attach_loss) weigh {1 + self.attached:.3g} times what they should in "
                "the gradients, and the rest is right: each must be added once, over the ranks that share it."
            )
        parts = format_list((f"{self._name(at)} {_times(share)}" for at, share in wrong), 4)
        return (
            f"The gradients of step 1 are those of its {len(self.shares)} micro-batches, but {parts}: every "
            "micro-batch of every rank must count once, and weigh as many tokens as it has unmasked."
        )

    def _name(self, at: int) -> str:
        number, rank = divmod(at, self.data_ranks)
        of = len(self.shares) // self.data_ranks
        where = f" of data rank {rank}" if self.data_ranks > 1 else ""
        return f"micro-batch {number + 1} of {of}{where}"


def _times(share: float) -> str:
    return "is missing" if abs(share) < SURE else f"counts {share:.3g} times"


def explain(setup: Setup, layout: Recording, folder: Path) -> str:
    """Compute the first step's gradients on one process, micro-batch by micro-batch, and fit the layout's to them.

    Args:
        setup: the configuration of one process, with the layout's micro-batches.
        layout: what the layout came to.
        folder: for the run.

    Returns:
        what fits, as a sentence; empty if nothing does.
    """
    count = layout.accumulation * layout.layout.dp
    size = sum(gradient.numel() * gradient.element_size() for gradient in layout.gradients.values())
    if (count + 2) * size > MEMORY:
        return ""
    with watching(_Apart, setup, folder) as one:
        parts = [*one.micro_batches(), one.attached()]
    shares = _fit(parts, layout.gradients)
    right = [1.0] * count + [0.0]
    if shares is None or all(abs(one - other) < SURE for one, other in zip(shares, right, strict=True)):
        return of_unreduced(parts[:count], layout)
    return str(Explanation(tuple(shares[:count]), shares[count], layout.layout.dp))


def of_unreduced(micro_batches: Sequence[Mapping[str, Tensor]], layout: Recording) -> str:
    """Say so if each rank's shard of the wrong gradients is a multiple of what its own micro-batches give."""
    size = layout.layout.dp
    wrong = [name for name, found in layout.gradients.items() if not _near(found, _sum(micro_batches, name, found))]
    if size == 1 or not wrong:
        return ""
    for rank in layout.ranks:
        for name in (name for name in wrong if name in rank.pieces):
            place = tuple(slice(first, end) for first, end in rank.pieces[name])
            found = layout.gradients[name]
            own = _sum(micro_batches[rank.data_rank :: size], name, found)
            if not _multiple(found[place].double(), own[place]):
                return ""
    return (
        f"The gradients of {group(wrong, layout.parameters)} are not reduced over the data-parallel ranks: each rank's "
        "shard is what its own micro-batches give."
    )


def _sum(parts: Sequence[Mapping[str, Tensor]], name: str, like: Tensor) -> Tensor:
    zero = torch.zeros_like(like, dtype=torch.double)
    return sum((part[name].double() for part in parts if name in part), zero)


def _near(found: Tensor, right: Tensor) -> bool:
    return norm([found.double() - right]) <= FIT * norm([right])


def _multiple(found: Tensor, own: Tensor) -> bool:
    square = float((own * own).sum())
    return norm([found - own * (float((found * own).sum()) / square if square else 0.0)]) <= FIT * norm([found])


def _fit(parts: Sequence[Mapping[str, Tensor]], whole: Mapping[str, Tensor]) -> list[float] | None:
    """The multiples of the parts that sum up to the whole; none if none do."""
    products = torch.tensor([[_product(one, other) for other in parts] for one in parts], dtype=torch.double)
    right = torch.tensor([_product(one, whole) for one in parts], dtype=torch.double)
    scale = products.diagonal().sqrt().clamp(min=1e-150)
    system = products / scale / scale[:, None]
    shares = torch.linalg.lstsq(system, (right / scale)[:, None], driver="gelsd").solution[:, 0] / scale
    square = _product(whole, whole)
    rest = square - 2 * float(shares @ right) + float(shares @ products @ shares)
    return shares.tolist() if square and rest < FIT**2 * square else None


def _product(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one.keys() & other.keys())


class _Apart(Watched):
    """The first step in parts."""

    def micro_batches(self) -> list[dict[str, Tensor]]:
        """The gradients of each."""
        stepper = self.stepper
        stepper.executor = self._executor = _Some(stepper.executor)
        self._batches, self._counts = stepper.fetch(stepper.loader, stepper.micro_batches(0))
        return [self._gradients(batch, 1.0) for batch in self._batches]

    def attached(self) -> dict[str, Tensor]:
        """The gradients of the losses that the model attaches, without the loss itself."""
        return self._gradients(None, 0.0)

    def _gradients(self, one: Batch | None, factor: float) -> dict[str, Tensor]:
        self._executor.one, self._executor.factor = one, factor
        self.stepper.gradients(0, self._batches, self._counts)
        found = {name: p.grad.cpu().clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        return found


class _Some:
    """An executor that trains on one micro-batch, or with another weight of the loss."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.one: Batch | None = None
        self.factor = 1.0

    def train(self, batches: Sequence[Batch], scale: Tensor | float) -> Tensor:
        chosen = list(batches) if self.one is None else [self.one]
        return self.executor.train(chosen, scale * self.factor)

    def evaluate(self, batch: Batch) -> Tensor:
        return self.executor.evaluate(batch)

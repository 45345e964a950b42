"""Parameters that two parts of a pipeline share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_train import ConfigError, Job, PluginError
from forge_train.mesh.tensors import local
from forge_train_kit.messages import wait_for_message


@dataclass(frozen=True)
class Tie:
    """A parameter, and its copy in another part."""

    copy: str
    copy_part: int
    owner: str
    owner_part: int


class Ties:
    """Keeps copies equal to what they copy, and brings their gradients to it.

    A copy is not a parameter of the model: optimizer, norm and checkpoint do not see it. It receives the owner's
    values before each step, which costs as much as summing the gradients on both sides would, and no optimizer state.
    """

    def __init__(self, job: Job, ties: Sequence[Tie], parts: Mapping[int, nn.Module], placement: Sequence[int]) -> None:
        self._ties, self._parts, self._placement = ties, parts, placement
        self._ranks = job.dist.ranks_along("pp")
        self._group = job.dist.mesh("dense", "pp").get_group() if job.dist.world > 1 else None
        self._equal = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Give copies their owners' values, if these may have changed; every rank calls it, with no weight gathered."""
        if self._equal:
            return
        self._equal = True
        for tie in self._ties:
            owner, copy = self._owner(tie), self._copy(tie)
            self._move(
                tie,
                None if owner is None else local(owner.detach()),
                None if copy is None else local(copy.detach()),
                self._placement[tie.owner_part],
                self._placement[tie.copy_part],
            )

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradient of every copy to its owner's; every rank calls it."""
        self.forget()
        for tie in self._ties:
            owner, copy = self._owner(tie), self._copy(tie)
            given = taken = None
            if copy is not None:
                given = local(torch.zeros_like(copy) if copy.grad is None else copy.grad)
            if owner is not None:
                if owner.requires_grad and owner.grad is None:
                    raise PluginError(
                        f"pp: {tie.owner} has no gradient to add that of {tie.copy} to, which is tied to it in another "
                        "part of the pipeline: somebody has taken it already. Untie them."
                    )
                taken = torch.empty_like(local(owner.grad if owner.grad is not None else owner.detach()))
            self._move(tie, given, taken, self._placement[tie.copy_part], self._placement[tie.owner_part])
            if owner is not None and owner.grad is not None and taken is not None:
                local(owner.grad).add_(taken)
            if copy is not None:
                copy.grad = None

    def forget(self) -> None:
        """Owners may change from here on."""
        self._equal = False

    def _move(self, tie: Tie, source: Tensor | None, target: Tensor | None, sender: int, receiver: int) -> None:
        """A tensor from one rank of the pipeline to another, or on one rank."""
        if source is not None and target is not None:
            self._check(tie, source, target)
            target.copy_(source)
        elif source is not None:
            wait_for_message(dist.isend(source.contiguous(), self._ranks[receiver], group=self._group), self._group)
        elif target is not None:
            buffer = torch.empty_like(target, memory_format=torch.contiguous_format)
            wait_for_message(dist.irecv(buffer, self._ranks[sender], group=self._group), self._group)
            target.copy_(buffer)

    def _check(self, tie: Tie, one: Tensor, other: Tensor) -> None:
        if one.shape != other.shape:
            raise ConfigError(
                f"{tie.owner} and {tie.copy} are tied, and a transform has split them in different ways "
                f"({list(one.shape)} and {list(other.shape)} on this rank); untie them in the model's configuration."
            )

    def _owner(self, tie: Tie) -> nn.Parameter | None:
        return self._parameter(tie.owner_part, tie.owner)

    def _copy(self, tie: Tie) -> nn.Parameter | None:
        return self._parameter(tie.copy_part, tie.copy)

    def _parameter(self, part: int, name: str) -> nn.Parameter | None:
        if part not in self._parts:
            return None
        owner, _, attribute = name.rpartition(".")
        return self._parts[part].get_submodule(owner)._parameters[attribute]

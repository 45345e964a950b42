"""Tensors that the ranks of a pipeline send each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_train import Batch, CommunicationError, Job, PluginError
from forge_train.base.errors import describe
from forge_train_kit.messages import wait_for_message
from forge_train_kit.ranks import coordinates, in_words


@dataclass(slots=True)
class Receipt:
    """A tensor on its way to or from this rank."""

    tensor: Tensor
    work: Any
    group: Any
    peer: str
    """Sender or receiver, in words."""

    def wait(self) -> Tensor:
        """The tensor, once it is there.

        Raises:
            CommunicationError: if the other rank has gone, or hangs.
        """
        try:
            wait_for_message(self.work, self.group)
        except RuntimeError as error:
            raise CommunicationError(
                f"{self.peer}, which holds another part of the pipeline, does not answer: {describe(error)}"
            ) from error
        return self.tensor


class Channel:
    """Hidden states and their gradients between neighbouring parts, in the order in which they are sent."""

    def __init__(self, job: Job) -> None:
        self._device, self._dtype = job.device, job.precision.compute
        self._ranks = job.dist.ranks_along("pp")
        self._group = job.dist.mesh("dense", "pp").get_group() if job.dist.world > 1 else None
        self._names = [f"Rank {rank}{in_words(coordinates(job.dist.layout, rank))}" for rank in self._ranks]
        self._sending: list[Receipt] = []

    def send(self, part: nn.Module, batch: Batch, tensor: Tensor, peer: int) -> None:
        """Send what a part gives for a batch to a rank of the pipeline, without waiting.

        Raises:
            PluginError: if it is not of the shape and dtype that the model declares.
        """
        shape = self._shape(part, batch)
        if tensor.shape != shape or tensor.dtype != self._dtype:
            raise PluginError(
                f"A part of the pipeline gives {list(tensor.shape)} {tensor.dtype}, and {type(part).__name__}."
                f"hidden_shape and the run's precision say {list(shape)} {self._dtype}; its neighbour expects that."
            )
        self._sending = [one for one in self._sending if not one.work.is_completed()]
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, self._ranks[peer], group=self._group)
        self._sending.append(Receipt(tensor, work, self._group, self._names[peer]))

    def receive(self, part: nn.Module, batch: Batch, peer: int) -> Receipt:
        """Begin to take what a part is given for a batch, or the gradient of what it gives: of one shape."""
        buffer = torch.empty(self._shape(part, batch), dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, self._ranks[peer], group=self._group)
        return Receipt(buffer, work, self._group, self._names[peer])

    def wait(self) -> None:
        """Until all is sent."""
        for receipt in self._sending:
            receipt.wait()
        self._sending.clear()

    def _shape(self, part: Any, batch: Batch) -> tuple[int, ...]:
        batch_size, sequence = batch.inputs.shape[:2]
        return tuple(part.hidden_shape(batch_size, sequence))

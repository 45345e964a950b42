"""One step of a pipeline on one rank, and the tensors held between the passes of each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input

from forge_train import Batch, Model, PluginError, Task
from forge_train.contract.batch import Direction
from forge_train_kit.model import full_tensor
from forge_train_kit.pipeline import Action, Work
from forge_train_kit.pipeline.backward import only_gradients

from .channel import Channel, Receipt
from .program import Operation, Receive, Send
from .split import add_weight_gradients

Place = tuple[int, int]
"""Part and micro-batch."""


@dataclass(slots=True)
class _Passed:
    """A forward pass whose backward pass is still to come."""

    x: Tensor
    """Input of the part: a leaf of its graph."""
    out: Tensor
    """Output of the part; the scaled loss for the last part."""
    gradient: Tensor | None = None
    """Of `out`, kept where the weights' gradients come later."""
    groups: Any = None
    """torch's own: where the weights' half of the backward pass begins."""


class Step:
    """Operations of a step, one by one."""

    def __init__(
        self,
        model: Model,
        task: Task,
        parts: Mapping[int, nn.Module],
        count: int,
        channel: Channel,
        batches: Sequence[Batch],
        scale: Tensor | float,
        *,
        recomputes: bool = False,
    ) -> None:
        """
        Args:
            model: its transforms are notified of each pass.
            task: gives the loss.
            parts: of this rank, by number.
            count: of all parts.
            channel: to other ranks.
            batches: the micro-batches.
            scale: factor of the losses.
            recomputes: whether units compute again what their backward pass needs. They do so in every call of
                autograd, and a second half has one for each group of weights: it is one whole backward pass then.
        """
        self._model, self._task, self._channel = model, task, channel
        self._parts, self._count, self._batches, self._scale = parts, count, batches, scale
        self._recomputes = recomputes
        self._local = {number: index for index, number in enumerate(parts)}
        self._hidden: dict[Place, Tensor | Receipt] = {}  # what a part is going to be given
        self._gradients: dict[Place, Tensor | Receipt] = {}  # of what it gave
        self._ready: dict[Action, Tensor] = {}  # what actions gave that another rank needs
        self._passed: dict[Place, _Passed] = {}
        self._losses: list[Tensor] = []

    def loss(self) -> Tensor:
        """The sum of the losses, zero where there are none."""
        return (
            torch.stack(self._losses).sum() if self._losses else torch.zeros((), device=self._batches[0].inputs.device)
        )

    def do(self, operation: Operation, *, last: bool) -> None:
        """Do what comes next; `last` as in `forge_train.MicroBatch`."""
        if isinstance(operation, Send):
            self._send(operation)
        elif isinstance(operation, Receive):
            self._receive(operation)
        else:
            direction = _DIRECTIONS[operation.work]
            batch = self._batches[operation.micro_batch]
            self._model.on_micro_batch(last, self._local[operation.part], direction, batch)
            {"forward": self._forward, "backward": self._backward, "input": self._input, "weight": self._weight}[
                direction
            ](operation)

    # -- between ranks --

    def _send(self, send: Send) -> None:
        action = send.action
        part = self._parts[action.part]
        self._channel.send(part, self._batches[action.micro_batch], self._ready.pop(action), send.peer)

    def _receive(self, receive: Receive) -> None:
        action = receive.action
        forward = action.work is Work.FORWARD
        number = action.part + (1 if forward else -1)
        receipt = self._channel.receive(self._parts[number], self._batches[action.micro_batch], receive.peer)
        (self._hidden if forward else self._gradients)[number, action.micro_batch] = receipt

    # -- passes --

    def _forward(self, action: Action) -> None:
        part, batch = self._parts[action.part], self._batches[action.micro_batch]
        place = (action.part, action.micro_batch)
        x = batch.inputs if action.part == 0 else _arrived(self._hidden.pop(place)).requires_grad_()
        hidden = part(x, **batch.model_inputs())
        hidden = hidden.clone() if hidden._is_view() else hidden  # torch's split backward detaches it in place
        if action.part == self._count - 1:
            loss = self._task.loss(part, hidden, batch)
            self._losses.append(full_tensor(loss.detach()))
            self._passed[place] = _Passed(x, loss * self._scale)
            return
        self._passed[place] = _Passed(x, hidden)
        self._hand_on(action, hidden.detach(), action.part + 1, self._hidden)

    def _backward(self, action: Action) -> None:
        passed = self._passed.pop((action.part, action.micro_batch))
        gradient = self._gradient_of(action)
        if passed.out.requires_grad:
            torch.autograd.backward(passed.out, gradient)
        self._give_back(action, passed.x, passed.x.grad)
        passed.x.grad = None

    def _input(self, action: Action) -> None:
        """The gradient of what the part was given. The first part's is of token ids: its whole backward pass waits."""
        passed = self._passed[action.part, action.micro_batch]
        passed.gradient = self._gradient_of(action)
        if action.part == 0 or not passed.out.requires_grad:
            self._give_back(action, passed.x, None)
            return
        gradients = None if passed.gradient is None else [passed.gradient]
        with only_gradients("input"):
            if self._recomputes:
                of_x: Tensor | None = torch.autograd.grad(
                    passed.out, passed.x, gradients, retain_graph=True, allow_unused=True
                )[0]
            else:
                found, passed.groups = stage_backward_input(
                    [passed.out], gradients, [passed.x], iter(self._trained(action.part))
                )
                of_x = found[0]
        self._give_back(action, passed.x, of_x)

    def _weight(self, action: Action) -> None:
        passed = self._passed.pop((action.part, action.micro_batch))
        if passed.groups is not None:
            try:
                with only_gradients("weight"):
                    add_weight_gradients(self._trained(action.part), passed.groups)
            except KeyError as error:
                raise PluginError(
                    f"pp: the weights of part {action.part} were exchanged between the two halves of its backward "
                    "pass. A transform that shards has to keep them gathered where a part has `split_backward`."
                ) from error
        elif passed.out.requires_grad:
            torch.autograd.backward(passed.out, passed.gradient)

    def _trained(self, part: int) -> list[nn.Parameter]:
        return [parameter for parameter in self._parts[part].parameters() if parameter.requires_grad]

    def _gradient_of(self, action: Action) -> Tensor | None:
        """Of what the part gave; None for the loss itself."""
        if action.part == self._count - 1:
            return None
        return _arrived(self._gradients.pop((action.part, action.micro_batch)))

    def _give_back(self, action: Action, x: Tensor, gradient: Tensor | None) -> None:
        if action.part:
            gradient = torch.zeros_like(x) if gradient is None else gradient
            self._hand_on(action, gradient, action.part - 1, self._gradients)

    def _hand_on(self, action: Action, tensor: Tensor, part: int, here: dict[Place, Tensor | Receipt]) -> None:
        if part in self._parts:
            here[part, action.micro_batch] = tensor
        else:
            self._ready[action] = tensor


_DIRECTIONS: dict[Work, Direction] = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.INPUT_GRADIENT: "input",
    Work.WEIGHT_GRADIENT: "weight",
}


def _arrived(tensor: Tensor | Receipt) -> Tensor:
    return tensor.wait() if isinstance(tensor, Receipt) else tensor

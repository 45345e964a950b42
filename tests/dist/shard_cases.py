"""What the tests of sharding train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import cases
import tp_cases
from forge_train import Job, Model, Plugin, hookimpl
from forge_train.contract.protocols import Span, SpanName
from forge_train_kit.losses import LossFunction
from forge_train_tools.planning.communication import Collective, Collectives


class Glance(Plugin):
    """A loss that calls the head once more than it uses what the head gives."""

    api = (1, 0)

    @hookimpl
    def loss(self, job: Any) -> LossFunction:
        def function(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
            head(hidden[:, :1])
            return F.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten(), reduction="sum")

        return function


class WhileBackward(Plugin):
    """What has happened by the time that the backward pass is through: gradients sent, the head's weights dropped."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.sent = 0
        self.sharded: list[bool] = []

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        def count(one: Collective) -> None:
            self.sent += "reduce" in one.kind

        return (lambda: Collectives(count)) if span == "forward_backward" else None

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: Any) -> None:
        (part,) = model.parts
        head = part.get_submodule("head")

        def look(module: nn.Module, *gradients: Any) -> None:
            self.sharded.append(isinstance(head.weight, DTensor))

        part.get_submodule("layers.0").register_full_backward_hook(look)


def while_backward(folder: str, plugins: Sequence[str], config: Mapping[str, Any]) -> dict[str, Any]:
    run = cases.tiny(folder, ["shard_cases:WhileBackward", *plugins], config, (), 1)
    watch: WhileBackward = run.plugin("while_backward")
    return {"sent": watch.sent, "sharded": watch.sharded}


class Wider(Plugin):
    """A model with a vocabulary of 259, of which 6 ranks have uneven rows, and a width that 3 do not divide."""

    api = (1, 0)

    @hookimpl
    def build_model(self, job: Any) -> nn.Module:
        return tp_cases.Model(259)

"""Faults of adapters and of what is learned, planted by plugins of the tests."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from forge_train import Applied, Phase, Plugin, Transform, hookimpl


class OneRanksRows(Plugin):
    """Makes each rank's rows of an adapter a parameter of their own, so that a checkpoint has those of one rank."""

    api = (1, 0)

    @hookimpl
    def parallelize(self, job: Any) -> Transform:
        def apply(part: nn.Module) -> Applied:
            found = []
            for path, module in part.named_modules():
                for name, one in [*module._parameters.items()]:
                    if "lora_" in name and isinstance(one, DTensor):
                        setattr(module, name, nn.Parameter(one.to_local(), requires_grad=one.requires_grad))
                        found.append(path)
            return Applied(part, tuple(found))

        return Transform(Phase.RECOMPUTE, "one_ranks_rows", apply)

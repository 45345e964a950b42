"""What the tests of mixed precision have their ranks do: train, and note in which dtype every module computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import cases
from forge_train import Job, Model, Plugin, hookimpl


class Dtypes(Plugin):
    """Notes the dtype of what goes into each module that has weights, as it is called, and that its weights have it."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen: dict[str, str] = {}

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        for name, module in model.named_modules():
            if name and not isinstance(module, nn.Embedding) and any(True for _ in module.parameters()):
                module.register_forward_pre_hook(self._note(name), with_kwargs=True)

    def _note(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            floats = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value)]
            (dtype,) = {value.dtype for value in floats if value.is_floating_point()}
            self.seen[name] = str(dtype)
            own = {getattr(module, key).dtype for key in module._parameters if module._parameters[key] is not None}
            assert own <= {dtype}, (name, own, dtype)

        return note


def dtypes(folder: str, plugins: Sequence[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Each module's dtype, and the norm of the first gradients."""
    run = cases.tiny(folder, (*plugins, Dtypes), config, steps=1)
    return {"dtypes": run.plugin("dtypes").seen, "norm": run.metrics[0]["grad_norm"]}

"""What the `precision` plugin does to a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_train import Applied, Specialisation


def narrow(part: nn.Module, dtype: torch.dtype) -> Applied:
    """Have every module of a part compute with copies of its weights in `dtype`.

    The copy is a property of the module's class, under the parameter's name: recompute, compile and a loss that calls
    the head all find it, and `named_parameters()` still gives the master weights. (torch's own parametrizations do the
    same, but rename the parameters.)
    """
    matched, narrowed = [], Specialisation(lambda _, names: {name: _copy(name, dtype) for name in names})
    for name, module in part.named_modules():
        own = tuple(key for key, value in module._parameters.items() if value is not None and value.is_floating_point())
        if own:
            narrowed(module, own)
            matched.append(name)

    def cast(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(_cast(value, dtype) for value in args), {k: _cast(value, dtype) for k, value in kwargs.items()}

    part.register_forward_pre_hook(cast, with_kwargs=True)
    return Applied(part, matched=tuple(matched), note=f"{str(dtype).removeprefix('torch.')} from fp32 weights")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _copy(name: str, dtype: torch.dtype) -> property:
    def weight(self: nn.Module) -> Tensor | None:
        parameter = self._parameters[name]
        return None if parameter is None else parameter.to(dtype)

    return property(weight)

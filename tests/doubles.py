"""What a model computes in float64, where rounding cannot hide a difference or make one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

BOUND = 2e-6
"""The largest difference of two logits: tables of rotations are stored in float32."""


class Doubles(TorchFunctionMode):
    """Casts to float64 wherever a model asks for float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*map(_wider, args), **{key: _wider(value) for key, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def in_double(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of a transformers model, or of one of Forge's with its head, computed in float64.

    The model keeps its weights in float64.
    """
    from transformers import PreTrainedModel

    library = isinstance(model, PreTrainedModel)
    if library:
        model.set_experts_implementation("eager")  # the default multiplies in float32 only
    with torch.no_grad(), Doubles():
        output = model.double()(tokens)
        found: Tensor = output.logits if library else model.get_submodule("head")(output)
    assert found.dtype == torch.float64
    return found

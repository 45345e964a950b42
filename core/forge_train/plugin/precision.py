"""The dtypes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..config.sections import Precision as PrecisionName


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run. A transform that covers `precision` makes them real."""

    param: torch.dtype
    """Of the weights while they compute."""
    compute: torch.dtype
    """Of activations."""
    reduce: torch.dtype
    """Of gradients while they are reduced over ranks."""
    master: torch.dtype
    """Of the weights the optimizer updates, and its state."""

    @classmethod
    def of(cls, name: PrecisionName) -> Precision:
        import torch

        narrow = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        return cls(param=narrow, compute=narrow, reduce=torch.float32, master=torch.float32)

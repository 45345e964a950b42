"""Rounding to the values of a narrow float, by arithmetic: a CPU casts to float8 and back ten times slower."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXPONENT = 0x7F800000
"""The bits of a float32 that hold its exponent."""
MANTISSA = 0x007FFFFF


@dataclass(frozen=True)
class Minifloat:
    """A float of 8 or 4 bits."""

    name: str
    mantissa: int
    """Bits of the mantissa that are stored."""
    smallest: int
    """Exponent of the smallest normal value."""
    largest: float
    dtype: torch.dtype | None
    """torch's, where it casts to it."""


E4M3 = Minifloat("e4m3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Minifloat("e5m2", 2, -14, 57344.0, torch.float8_e5m2)
E2M1 = Minifloat("e2m1", 1, 0, 6.0, None)


def nearest(x: Tensor, kind: Minifloat, *, stochastic: bool = False) -> Tensor:
    """The nearest values of a kind, ties to even; beyond the largest, the largest. NaN stays NaN.

    Args:
        x: float32.
        kind: whose values.
        stochastic: whether to take one of the two neighbours instead, with probabilities by which the mean is `x`.
    """
    binade = (x.view(torch.int32) & EXPONENT).view(torch.float32)
    step = binade.clamp_min(2.0**kind.smallest) * 2.0**-kind.mantissa
    steps = x / step
    steps = torch.floor(steps + torch.rand_like(steps)) if stochastic else torch.round(steps)
    return (steps * step).clamp(-kind.largest, kind.largest)


def power_of_two(scale: Tensor) -> Tensor:
    """The next power of two, upwards; NaN stays NaN.

    Scales that are powers of two move no value's rounding: a layout whose largest value is another rounds alike.
    """
    above = ((scale.view(torch.int32) + MANTISSA) & EXPONENT).view(torch.float32)
    return torch.where(scale.isfinite(), above, scale)

"""The recipes, by name."""

from __future__ import annotations

from typing import Literal

from .formats import Blocks, Format, Scaled
from .minifloat import E2M1, E4M3, E5M2
from .products import Recipe

WHOLE = Scaled(E4M3)
ROWS = Scaled(E4M3, rows=True)


def scaled(name: Literal["tensorwise", "rowwise", "rowwise_gw_hp"], *, kernel: bool) -> Recipe:
    """torchao's, with its formats; scales are powers of two in all of them."""
    if name == "tensorwise":
        gradient = Scaled(E5M2)
        return Recipe((WHOLE, WHOLE), (gradient, WHOLE), (gradient, WHOLE), kernel=kernel)
    if name == "rowwise":
        return Recipe((ROWS, ROWS), (ROWS, ROWS), (ROWS, ROWS), kernel=kernel)
    return Recipe((ROWS, ROWS), (ROWS, WHOLE), None, kernel=kernel)


def scaled_experts(name: Literal["tensorwise", "rowwise", "rowwise_gw_hp"], *, kernel: bool) -> Recipe:
    """The same for experts, whose kernel knows a scale for each row and no other."""
    return Recipe((ROWS, ROWS), (ROWS, ROWS), None if name == "rowwise_gw_hp" else (ROWS, ROWS), kernel=kernel)


def deepseek(
    scales: Literal["float32", "e8m0"] = "float32", *, stochastic: bool = False, kernel: bool = False
) -> Recipe:
    """Activations and gradients 1 × 128, weights 128 × 128, e4m3 throughout (arXiv:2412.19437, §3.3)."""
    activation, weight = Blocks(E4M3, 128, scales=scales), Blocks(E4M3, 128, square=True, scales=scales)
    gradient = Blocks(E4M3, 128, scales=scales, stochastic=stochastic)
    return Recipe((activation, weight), (gradient, weight), (gradient, activation), kernel=kernel)


def mx() -> Recipe:
    """MXFP8: e4m3 in blocks of 32 along the contracted axis, scaled by powers of two (arXiv:2310.10537)."""
    return _alike(Blocks(E4M3, 32, scales="e8m0"))


def fp4(form: Literal["nvfp4", "mxfp4"], *, stochastic: bool = False) -> Recipe:
    """e2m1 in blocks of 16 with e4m3 scales and one for the tensor, or of 32 with powers of two."""
    if form == "nvfp4":
        one, gradient = Blocks(E2M1, 16, scales="e4m3"), Blocks(E2M1, 16, scales="e4m3", stochastic=stochastic)
    else:
        one, gradient = Blocks(E2M1, 32, scales="e8m0"), Blocks(E2M1, 32, scales="e8m0", stochastic=stochastic)
    return Recipe((one, one), (gradient, one), (gradient, one))


def _alike(one: Format) -> Recipe:
    return Recipe((one, one), (one, one), (one, one))

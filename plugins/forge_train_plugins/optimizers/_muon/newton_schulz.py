"""The nearest orthogonal matrix, by polynomials."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]
"""a, b, c of a x + b x³ + c x⁵, applied to singular values."""
Coefficients = Literal["quintic", "polar_express"]

QUINTIC: Polynomial = (3.4445, -4.7750, 2.0315)
"""Steep at zero, and within 0.7 to 1.2 after five steps (Keller Jordan et al. 2024, as in `torch.optim.Muon`)."""
POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""The best polynomial for each step in turn (Amsel et al. 2025, arXiv:2505.16932, algorithm 1). The last repeats."""
MARGIN = 1.01
"""Singular values that rounding makes larger than 1 must stay where the polynomials converge (its §3.4)."""


def polynomials(coefficients: Coefficients, steps: int) -> Iterator[Polynomial]:
    """The polynomial of each step."""
    if coefficients == "quintic":
        return itertools.repeat(QUINTIC, steps)
    *first, last = POLAR_EXPRESS
    safe = [(a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in first]
    return itertools.islice(itertools.chain(safe, itertools.repeat(last)), steps)


def orthogonalise(
    matrices: Tensor, *, coefficients: Coefficients, steps: int, dtype: torch.dtype, eps: float
) -> Tensor:
    """U Vᵀ of each matrix U S Vᵀ, nearly.

    Args:
        matrices: `[matrices, rows, columns]`; may be overwritten.
        coefficients: which polynomials.
        steps: how many.
        dtype: of the products, and of the result.
        eps: the least norm that is divided by.
    """
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x.div_((norm * MARGIN if coefficients == "polar_express" else norm).clamp_(min=eps))
    one = len(x) == 1
    if one:
        x = x[0]  # torch's plain products are faster than its batched ones
    product = torch.addmm if one else torch.baddbmm
    other, gram = torch.empty_like(x), x.new_empty(*x.shape[:-1], x.shape[-2])
    change = torch.empty_like(gram)
    for a, b, c in polynomials(coefficients, steps):
        torch.matmul(x, x.mT, out=gram)
        product(gram, gram, gram, beta=b, alpha=c, out=change)
        product(x, change, x, beta=a, out=other)
        x, other = other, x
    if one:
        x = x[None]
    return x.mT if tall else x

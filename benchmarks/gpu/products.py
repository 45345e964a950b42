"""Products in float8, grouped products, narrow states: a device's kernels against what Forge computes without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forge_train_kit.model.block_codes import BlockTensor
from forge_train_kit.model.block_format import BlockFormat, Kind
from forge_train_kit.optim.quantised import Codes
from forge_train_kit.optim.stochastic import rounded
from forge_train_plugins.precision._low_precision import kernels, recipes
from forge_train_plugins.precision._low_precision.products import ALONE, GroupedProduct, LinearProduct

from .attention import dirty, largest
from .case import LacksError, Row, Size

TOKENS, TOY_TOKENS = (1, 7, 127, 1024, 8191), (1, 7, 127)
SHARES = (
    (0.0, 0.5, 0.25, 0.25),
    (1.0, 0.0, 0.0, 0.0),
    (0.25, 0.25, 0.25, 0.25),
    (0.4, 0.1, 0.1, 0.1),
)
"""Shares of the tokens by expert: an empty one, all on one, even, and rows that are nobody's."""
NEAR = 2e-2
"""Relative error of bf16 results whose sums have another order, and in float8 fewer bits."""


def linear(size: Size, recipe: str) -> list[Row]:
    """A float8 product and its gradients: kernel against emulation."""
    device = torch.device(size.device)
    if recipe == "deepseek":
        why, ways = (
            kernels.lacking_blocks(device, torch.bfloat16),
            [recipes.deepseek(kernel=one) for one in (True, False)],
        )
    else:
        why = kernels.lacking(device, torch.bfloat16, rows=recipe != "tensorwise")
        ways = [recipes.scaled(recipe, kernel=one) for one in (True, False)]  # type: ignore[arg-type]
    if why:
        raise LacksError(why)
    outputs, inputs = size.choose((1536, 4096), (48, 64))
    rows = []
    for tokens in size.choose(TOKENS, TOY_TOKENS):
        x, weight, gradient = draw(device, (tokens, inputs), (outputs, inputs), (tokens, outputs))
        found, wanted = (
            _gradients(lambda a, b, how=how: LinearProduct.apply(a, b, how, ALONE)[0], x, weight, gradient)
            for how in ways
        )
        rows.append(compare(f"{recipe}, {tokens} × {inputs} → {outputs}", found, wanted))
    return rows


def experts(size: Size, recipe: str) -> list[Row]:
    """A grouped float8 product and its gradients: kernel against emulation, with NaN in rows that are nobody's."""
    device = torch.device(size.device)
    if not kernels.can_group(device):
        raise LacksError("torch has a grouped float8 kernel for SM 9.0 (Hopper) only")
    outputs, inputs = size.choose((1536, 2048), (48, 64))
    ways = [recipes.scaled_experts(recipe, kernel=kernel) for kernel in (True, False)]  # type: ignore[arg-type]
    return _grouped(size, (outputs, inputs), recipe, lambda a, b, s, way: GroupedProduct.apply(a, b, s, ways[way])[0])


def grouped(size: Size) -> list[Row]:
    """The grouped product in bf16 against a loop over experts in float64."""

    def product(a: Tensor, b: Tensor, sizes: Tensor, way: int) -> Tensor:
        if way == 0:
            return kernels.grouped(a, b, sizes)
        ends = sizes.cumsum(0).tolist()
        parts = [a[end - n : end] @ one.t() for end, n, one in zip(ends, sizes.tolist(), b, strict=True)]
        return torch.cat([*parts, a.new_zeros(len(a) - ends[-1], b.shape[1])])

    return _grouped(size, size.choose((1536, 2048), (48, 64)), "bf16", product, exact=True)


def states(size: Size) -> list[Row]:
    """Stochastic rounding and optimizer states in 8 and 4 bits, fused on the device, against the CPU's."""
    values = torch.randn(size.choose((4096, 4096), (64, 200)), generator=torch.Generator().manual_seed(0))
    same = torch.equal(rounded(values.to(size.device), "w", 1).cpu(), rounded(values, "w", 1))
    rows = [Row("rounded stochastically to bf16", "equal" if same else "different", "equal", same)]
    for bits in (8, 4):
        table = Codes(bits, signed=True)
        found, right = (
            table.unpacked(table.quantised(one, "w", 1)[0], values.shape[-1]).cpu().int()
            for one in (values.to(size.device), values)
        )
        share, most = (found != right).double().mean().item(), int((found - right).abs().max())
        rows.append(
            Row(f"states in {bits} bits: other codes", f"{share:.1e}", "≤ 1.0e-04", share <= 1e-4 and most <= 1)
        )
    return rows


def codes(size: Size, kind: Kind) -> list[Row]:
    """A frozen weight in codes: the device's against the CPU's, and products with it against those with its values."""
    outputs, inputs = size.choose((4096, 4096), (48, 128))
    x, weight, gradient = draw(torch.device(size.device), (127, inputs), (outputs, inputs), (127, outputs))
    rows = []
    for double in (False, True):
        format, name = BlockFormat(kind, double=double), f"{kind}{', double scales' * double}"
        found, right = (format.encode(one)[0].cpu().int() for one in (weight, weight.cpu()))
        share = (found != right).double().mean().item()
        rows.append(Row(f"{name}: other codes", f"{share:.1e}", "≤ 1.0e-04", share <= 1e-4))
        held = BlockTensor.of(weight, format)
        size_of = sum(one.nbytes for one in held.parts) / weight.numel()
        rows.append(Row(f"{name}: bytes a value", f"{size_of:.3f}", "—", True))
        dirty(x.device)
        both = []
        for one in (held, held.plain()):
            a = x.detach().requires_grad_()
            out = torch.nn.functional.linear(a, one)
            both.append([out.detach(), *torch.autograd.grad(out, a, gradient)])
        rows.append(compare(f"{name}: 127 × {inputs} → {outputs}", *both))
    return rows


def _grouped(
    size: Size,
    shape: tuple[int, int],
    name: str,
    product: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    *,
    exact: bool = False,
) -> list[Row]:
    device, rows = torch.device(size.device), []
    for tokens in size.choose(TOKENS, TOY_TOKENS):
        for shares in SHARES:
            counts = [int(share * tokens) for share in shares]
            counts[-1] += tokens - sum(counts) if sum(shares) == 1 and counts[-1] else 0
            sizes = torch.tensor(counts, device=device)
            own = int(sum(counts))
            if not own:
                continue
            given = draw(device, (tokens, shape[1]), (len(shares), *shape), (tokens, shape[0]))
            found, right = _both(product, given, sizes, own, exact=exact)
            rows.append(compare(f"{name}, {tokens} rows as {'+'.join(map(str, counts))}", found, right))
    return rows


def _both(
    product: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    given: list[Tensor],
    sizes: Tensor,
    own: int,
    *,
    exact: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Results of the first way, in dirty memory and with NaN in rows that are nobody's, and of the second."""
    x, weight, gradient = given
    gradient = gradient[:own]
    wanted = [one.double() if exact else one for one in (x, weight, gradient)]
    if not exact:
        x = x.clone()
        x[own:] = torch.nan
    dirty(x.device)
    found = _gradients(lambda a, b: product(a, b, sizes, 0)[:own], x, weight, gradient)
    right = _gradients(lambda a, b: product(a, b, sizes, 1)[:own], *wanted)
    found[1], right[1] = found[1][:own], right[1][:own]
    return found, right


def _gradients(product: Callable[[Tensor, Tensor], Tensor], *given: Tensor) -> list[Tensor]:
    """The product, and the gradients of both factors."""
    factors = [one.detach().requires_grad_() for one in given[:2]]
    out = product(*factors)
    return [out.detach(), *torch.autograd.grad(out, factors, given[2])]


def draw(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Random bf16 tensors, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]


def compare(name: str, found: list[Tensor], wanted: list[Any]) -> Row:
    """Output and gradients, relative to their norms."""
    errors = [
        float((f.double() - w.double()).norm() / w.double().norm().clamp_min(1e-6))
        for f, w in zip(found, wanted, strict=True)
    ]
    worst = largest(errors)
    return Row(name, f"{worst:.1e}", f"≤ {NEAR:.1e}", ok=worst <= NEAR)

"""Expert feed-forward blocks, computed together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Init
from forge_train.mesh.tensors import local

if TYPE_CHECKING:
    from ..moe import MoE

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`rows [rows, in]` sorted by expert, `weight [experts, out, in]`, `sizes [experts]` → `[rows, out]`. Outputs for rows
beyond the sum of sizes may be anything."""

Gate = Callable[[Tensor, Tensor], Tensor]
"""Makes the input of `down` from the outputs of `gate` and `up`."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}


def gate_of(config: MoE.Config) -> Gate:
    if config.activation == "clamped_swiglu":
        return partial(clamped_swiglu, alpha=config.alpha, limit=config.limit)
    return partial(gated, GATES[config.activation])


def gated(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """As in GPT-OSS (arXiv:2508.10925)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


class Experts(nn.Module):
    """`down(act(gate(x)) · up(x))` of each row's own expert.

    Other plugins find these modules by `domain`, split them as `expert_plan` declares, and may replace `product` with
    another grouped product.

    Args:
        count: number of experts.
        dim: width of tokens.
        hidden: width of one expert.
        gate: the activation of each expert.
        matmul: which grouped product to use.
        std: of initial weights that read the residual stream.
        output_std: of initial weights that write to it.
        bias: whether the three projections have biases.
    """

    domain = "expert"
    product: Product

    def __init__(
        self,
        count: int,
        dim: int,
        hidden: int,
        *,
        gate: Gate = partial(gated, F.silu),  # noqa: B008 — a function
        matmul: Literal["auto", "grouped", "loop"] = "auto",
        std: float = 0.02,
        output_std: float = 0.02,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.combine, self.std, self.output_std, self.bias = gate, std, output_std, bias
        self.gate = nn.Parameter(torch.empty(count, hidden, dim))
        self.up = nn.Parameter(torch.empty(count, hidden, dim))
        self.down = nn.Parameter(torch.empty(count, dim, hidden))
        if bias:
            self.gate_bias, self.up_bias = (nn.Parameter(torch.empty(count, hidden)) for _ in range(2))
            self.down_bias = nn.Parameter(torch.empty(count, dim))
        self.product = {"auto": automatic, "grouped": grouped, "loop": looped}[matmul]

    def initial(self, name: str) -> Init:
        if name.endswith("bias"):
            return Init("zeros")
        return Init("normal", self.output_std if name == "down" else self.std)

    def expert_plan(self) -> dict[str, tuple[int, int]]:
        """Parameter → the axis of experts, and the axis that tensor parallelism splits within an expert. Experts with
        biases are never split within."""
        plan = {"gate": (0, 1), "up": (0, 1), "down": (0, 2)}
        return plan | {f"{name}_bias": (0, 1) for name in plan if self.bias}

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """`rows [rows, dim]` sorted by expert, `sizes [experts here]` → `[rows, dim]`."""
        gate, up = (self.product(rows, local(weight), sizes) for weight in (self.gate, self.up))
        if not self.bias:
            return self.product(self.combine(gate, up), local(self.down), sizes)
        each = torch.arange(len(rows), device=rows.device)
        expert = torch.searchsorted(sizes.cumsum(0), each, right=True).clamp(max=len(sizes) - 1)
        # Its gradient is summed in the same order in every run, even on CUDA, unlike the gradient of indexing.
        of_gate, of_up, of_down = (
            F.embedding(expert, local(bias)) for bias in (self.gate_bias, self.up_bias, self.down_bias)
        )
        return self.product(self.combine(gate + of_gate, up + of_up), local(self.down), sizes) + of_down


def automatic(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """The grouped product if torch supports the shapes, else the loop."""
    return (grouped if groupable(rows, weight) else looped)(rows, weight, sizes)


def groupable(rows: Tensor, weight: Tensor) -> bool:
    """Return True if torch's grouped product supports these: strides of 16 bytes, and on CUDA bf16."""
    kinds = (torch.bfloat16,) if rows.device.type == "cuda" else (torch.float32, torch.bfloat16, torch.float16)
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    return rows.dtype in kinds and rows.dtype == weight.dtype and aligned and len(rows) > 0


_grouped_mm: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm  # the former since 2.12


def grouped(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """One kernel for all experts. It rejects the strides that a single row may have even though it is contiguous."""
    rows = rows.reshape(-1).view(rows.shape)
    product: Tensor = _grouped_mm(rows, weight.transpose(1, 2), offs=sizes.cumsum(0, dtype=torch.int32))
    return product


def looped(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """One product for each expert; the host waits for their sizes. The reference for every other product."""
    bounds = sizes.tolist()
    parts = torch.split(rows, [*bounds, len(rows) - sum(bounds)])
    return torch.cat(
        [F.linear(part, one) for part, one in zip(parts, weight, strict=False)]
        + [rows.new_zeros(len(parts[-1]), weight.shape[1])]
    )

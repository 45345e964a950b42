"""Expert feed-forward blocks, computed together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import Init
from forge_train.ground.tensors import local

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`rows [rows, in]` sorted by expert, `weight [experts, out, in]`, `sizes [experts]` → `[rows, out]`. What it gives for
rows beyond the sum of sizes may be anything."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}


class Experts(nn.Module):
    """`down(act(gate(x)) · up(x))` of each row's own expert.

    Other plugins find these modules by `domain`, split them as `expert_plan` says, and may put another grouped product
    in the place of `product`.

    Args:
        count: number of experts.
        dim: width of tokens.
        hidden: width of one expert.
        activation: a key of `GATES`.
        matmul: which grouped product.
        std: of the initial weights that read the residual stream.
        output_std: of those that write it.
    """

    domain = "expert"
    product: Product

    def __init__(
        self,
        count: int,
        dim: int,
        hidden: int,
        *,
        activation: str = "swiglu",
        matmul: Literal["auto", "grouped", "loop"] = "auto",
        std: float = 0.02,
        output_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.act, self.std, self.output_std = GATES[activation], std, output_std
        self.gate = nn.Parameter(torch.empty(count, hidden, dim))
        self.up = nn.Parameter(torch.empty(count, hidden, dim))
        self.down = nn.Parameter(torch.empty(count, dim, hidden))
        self.product = {"auto": automatic, "grouped": grouped, "loop": looped}[matmul]

    def initial(self, name: str) -> Init:
        return Init("normal", self.output_std if name == "down" else self.std)

    def expert_plan(self) -> dict[str, tuple[int, int]]:
        """Parameter → the axis of experts, and the axis that tensor parallelism splits within an expert."""
        return {"gate": (0, 1), "up": (0, 1), "down": (0, 2)}

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """`rows [rows, dim]` sorted by expert, `sizes [experts here]` → `[rows, dim]`."""
        gate, up = (self.product(rows, local(weight), sizes) for weight in (self.gate, self.up))
        return self.product(self.act(gate) * up, local(self.down), sizes)


def automatic(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """The grouped product where torch can do it, else the loop."""
    return (grouped if groupable(rows, weight) else looped)(rows, weight, sizes)


def groupable(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product takes these: strides of 16 bytes, and on CUDA bf16."""
    kinds = (torch.bfloat16,) if rows.device.type == "cuda" else (torch.float32, torch.bfloat16, torch.float16)
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    return rows.dtype in kinds and rows.dtype == weight.dtype and aligned and len(rows) > 0


_grouped_mm: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm  # the former since 2.12


def grouped(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """One kernel for all experts. It refuses the strides that a single row may have although it is contiguous."""
    rows = rows.reshape(-1).view(rows.shape)
    product: Tensor = _grouped_mm(rows, weight.transpose(1, 2), offs=sizes.cumsum(0, dtype=torch.int32))
    return product


def looped(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """One product for each expert; the host waits for their sizes. The oracle of every other product."""
    bounds = sizes.tolist()
    parts = torch.split(rows, [*bounds, len(rows) - sum(bounds)])
    return torch.cat(
        [F.linear(part, one) for part, one in zip(parts, weight, strict=False)]
        + [rows.new_zeros(len(parts[-1]), weight.shape[1])]
    )

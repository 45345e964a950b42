"""The module of the `swiglu` plugin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from forge_train_kit.layers import Layer
from forge_train_kit.model import Linear, TensorStyle, flops_per_token


def relu_squared(x: Tensor) -> Tensor:
    """Primer's activation (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


gelu_tanh = partial(F.gelu, approximate="tanh")

GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": gelu_tanh,
    "reglu": F.relu,
}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "relu2": relu_squared,
}


class DenseFeedForward(nn.Module):
    """`down(act(gate(x)) · up(x))`, or `down(act(up(x)))` where the activation is not a gated one."""

    def __init__(self, layer: Layer, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.gate = Linear(layer.dim, layer.ffn_dim, bias=layer.bias, std=layer.std) if activation in GATED else None
        self.up = Linear(layer.dim, layer.ffn_dim, bias=layer.bias, std=layer.std)
        self.down = Linear(layer.ffn_dim, layer.dim, bias=layer.bias, std=layer.output_std)
        self.act = (GATED | PLAIN)[activation]
        projections = 2 if self.gate is None else 3
        self.weights = projections * layer.dim * layer.ffn_dim

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, sequence, dim]` → the same."""
        hidden = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        out: Tensor = self.down(hidden)
        return out

    def flops_per_token(self, sequence: int) -> int:
        return flops_per_token(sequence, weights=self.weights)

    def tensor_plan(self) -> dict[str, TensorStyle]:
        plan: dict[str, TensorStyle] = {"up": "colwise", "down": "rowwise"}
        return plan if self.gate is None else {"gate": "colwise", **plan}

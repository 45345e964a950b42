"""What modules of attention share."""

from __future__ import annotations

from forge_train.nn import Linear


class HeadsLinear(Linear):
    """A projection to or from heads, each of so many features, which tensor parallelism keeps together."""

    def __init__(self, in_features: int, out_features: int, head_dim: int, *, std: float, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias, std=std)
        self.head_dim = head_dim

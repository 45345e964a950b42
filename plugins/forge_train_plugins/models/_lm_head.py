"""The module of the `lm_head` plugin."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from forge_train_kit.heads import HeadSpec
from forge_train_kit.model import Linear, TensorStyle


class LMHead(Linear):
    """Hidden states `[…, dim]` → logits `[…, vocabulary]`, one product without a bias.

    A forward hook divides and caps the logits, so that tensor parallelism and narrow formats can still replace the
    product. Their hooks run after this one, on a rank's share of the logits.
    """

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec.dim, spec.vocabulary, std=spec.std)
        self.divisor, self.soft_cap = spec.divisor, spec.soft_cap
        if spec.divisor != 1 or spec.soft_cap is not None:
            self.register_forward_hook(_Bend(spec.divisor, spec.soft_cap))

    def tensor_plan(self) -> dict[str, TensorStyle]:
        return {"": "logits"}


@dataclass(frozen=True)
class _Bend:
    """`cap · tanh(logits / divisor / cap)` (cap: Gemma 2, arXiv:2408.00118; divisor: Granite, arXiv:2203.03466)."""

    divisor: float
    soft_cap: float | None

    def __call__(self, module: nn.Module, args: object, logits: Tensor) -> Tensor:
        if self.divisor != 1:
            logits = logits / self.divisor
        return logits if self.soft_cap is None else (logits / self.soft_cap).tanh() * self.soft_cap

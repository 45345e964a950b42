"""Updates merged into the weights, read range by range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from forge_train import ConfigError
from forge_train_kit.state_map import Box, StateMap, Step, View

from .sizes import size

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sum(View):
    """`W + scale · B A`, computed in fp32 and rounded once to the weight's dtype."""

    weight: View
    a: View
    b: View
    scale: float

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        rows, columns = box
        rank = (0, self.a.shape[0])
        return [(self.weight, box), (self.a, (rank, columns)), (self.b, (rows, rank))]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        weight, a, b = (part.float() for part in parts)
        return weight.addmm(b, a, alpha=self.scale).to(self.dtype)


@dataclass(frozen=True)
class Merge(StateMap):
    """Takes each weight with its two factors, and gives the sum under the weight's name."""

    config: Any

    def apply(self, step: Step) -> None:
        for name in [one.removesuffix(".lora_A") for one in step.tensors if one.endswith(".lora_A")]:
            if found := step.take(f"{name}.weight", f"{name}.lora_A", f"{name}.lora_B"):
                weight, a, b = found
                step.give(f"{name}.weight", Sum(weight.shape, weight.dtype, weight, a, b, size(self.config, name)[1]))

    def inverse(self) -> NoReturn:
        raise ConfigError("lora: merged weights can't be taken apart again.")

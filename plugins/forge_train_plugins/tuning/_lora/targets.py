"""The weights of a part that can have an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

WEIGHT, MAGNITUDE = "weight", "lora_magnitude"
FULL = "lora_full_"
"""Begins the name of a copy that is trained in full; that of the parameter in whose place it stands follows."""


@dataclass(frozen=True)
class Target:
    """A linear, an embedding, or a stack: a parameter that holds one matrix of each expert.

    Args:
        name: the module's; a stack has its parameter's.
        module: the module.
        key: the weight's name in the module.
    """

    name: str
    module: Any
    key: str = WEIGHT

    @property
    def weight(self) -> Tensor:
        found: Tensor = self.module._parameters[self.key]
        return found

    @property
    def is_stack(self) -> bool:
        return self.weight.ndim == 3

    @property
    def is_embedding(self) -> bool:
        return isinstance(self.module, nn.Embedding)

    @property
    def factors(self) -> tuple[str, str]:
        """Names, in the module, of the parameters that its update has."""
        if self.is_embedding:
            return "lora_embedding_A", "lora_embedding_B"
        before = f"{self.key}_" if self.is_stack else ""
        return f"{before}lora_A", f"{before}lora_B"


def targets(part: nn.Module) -> dict[str, Target]:
    """Those of a part by name, without linears whose weight torch's own attention reads past their forward."""
    found = {}
    hidden = {
        f"{path}.{name}"
        for path, module in part.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        for name, _ in module.named_modules()
    }
    for path, module in part.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and path not in hidden:
            found[path] = Target(path, module)
        elif getattr(module, "domain", "") == "expert":
            stacks = [key for key, one in module._parameters.items() if one is not None and one.ndim == 3]
            found |= {f"{path}.{key}": Target(f"{path}.{key}", module, key) for key in stacks}
    return found

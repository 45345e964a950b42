"""Gives each modality weights of its own in the layers of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from forge_train import ConfigError
from forge_train_kit.model import Kinds, TensorStyle, flops_per_token
from forge_train_kit.specialisation import Specialisation


def give_weights(blocks: Mapping[str, nn.Module], kinds: Kinds, shared: Collection[str] = ()) -> None:
    """Have every module with weights compute a position with those of its kind.

    Args:
        blocks: layer number → the layer: its `attention` mixes tokens, and its other children work on each alone.
        kinds: tells the kind of positions.
        shared: parts without weights of their own: `norms`, `attention`, `feed_forward`.

    Raises:
        ConfigError: for a layer that can't have such weights.
    """
    changes = {"attention": Specialisation(_mixing), "feed_forward": Specialisation(_alone)}
    norm = Specialisation(_norm)
    for number, block in blocks.items():
        for name, module in block.named_children():
            part = name if name in changes else "norms"
            if part in shared or not any(True for _ in module.parameters()):
                continue
            one: Any = module
            if name == "attention":
                if not all(hasattr(one, method) for method in ("project", "output", "another")):
                    raise ConfigError(_cannot(number, name, one, "has no separate projections"))
                make = one.another
            else:
                if any(getattr(inner, "domain", "") == "expert" for inner in one.modules()):
                    raise ConfigError(_cannot(number, name, one, "has experts"))
                make = partial(copy.deepcopy, one)
            if _plan(one).get("", "gather") != "gather":
                raise ConfigError(_cannot(number, name, one, "distributes tokens itself"))
            one.others = nn.ModuleDict({kind: make() for kind in kinds.names})
            one.kinds = kinds
            changes.get(name, norm)(one)


def _cannot(number: str, name: str, module: nn.Module, why: str) -> str:
    return (
        f"mot: the {name} of layer {number} ({type(module).__name__}) {why}, so modalities can't have weights of their "
        "own there; choose another plugin for it, or another fusion."
    )


def _mixing(own: Any) -> dict[str, Any]:
    def project(self: Any, x: Tensor) -> Any:
        return self.kinds.apply_each(x, [partial(own.project, self), *(one.project for one in self.others.values())])

    def output(self: Any, mixed: Tensor) -> Any:
        return self.kinds.apply_each(mixed, [partial(own.output, self), *(one.output for one in self.others.values())])

    return {"project": project, "output": output, **_declared(own)}


def _alone(own: Any) -> dict[str, Any]:
    def forward(self: Any, x: Tensor) -> Any:
        return self.kinds.apply_each(x, [partial(own.forward, self), *self.others.values()])

    return {"forward": forward, **_declared(own)}


def _norm(own: Any) -> dict[str, Any]:
    def forward(self: Any, x: Tensor) -> Any:
        return self.kinds.apply_each(x, [partial(own.forward, self), *self.others.values()], self.sequence_piece)

    return {"forward": forward, "sequence_piece": (0, 1)}


def _declared(own: Any) -> dict[str, Callable[..., Any]]:
    """Declarations of a module for all its weights: they are split alike, and each position meets one set."""

    def tensor_plan(self: Any) -> dict[str, TensorStyle]:
        plan: dict[str, TensorStyle] = {"": "summed"}
        declared: Mapping[str, TensorStyle] = own.tensor_plan(self)
        for path, style in declared.items():
            style = "partial" if style == "rowwise" else style
            plan |= {path: style} if path else {}
            plan |= {f"others.{kind}.{path}": style for kind, one in self.others.items() if _has(one, path)}
        return plan

    def flops(self: Any, sequence: int) -> int:
        if hasattr(own, "flops_per_token"):
            return int(own.flops_per_token(self, sequence))
        of_others = {id(parameter) for parameter in self.others.parameters()}
        weights = (one.numel() for one in self.parameters() if one.ndim > 1 and id(one) not in of_others)
        return flops_per_token(sequence, weights=sum(weights))

    plans = {"tensor_plan": tensor_plan} if hasattr(own, "tensor_plan") else {}
    return {**plans, "flops_per_token": flops}


def _plan(module: Any) -> Mapping[str, TensorStyle]:
    plan: Mapping[str, TensorStyle] = module.tensor_plan() if hasattr(module, "tensor_plan") else {}
    return plan


def _has(module: nn.Module, path: str) -> bool:
    return bool(path) and any(name == path for name, _ in module.named_modules())

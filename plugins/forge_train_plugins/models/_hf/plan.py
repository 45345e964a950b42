"""The plan of tensor parallelism that a class of `transformers` declares, in Forge's styles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from forge_train import Specialisation
from forge_train.ground.present import few
from forge_train.nn import TensorStyle

STYLES: Mapping[str, TensorStyle] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicated_with_grad_allreduce": "heads",
}
"""transformers' style of a module inside a block → Forge's."""


def translated(part: Any, base: str, units: tuple[str, ...], *, kernel: bool) -> dict[str, TensorStyle]:
    """Module → style.

    Args:
        part: the model.
        base: the name of the model without its head.
        units: its blocks.
        kernel: whether the run's kernel computes attention; a class that does itself makes masks from what it sees of
            a sequence.

    Raises:
        TypeError: saying what the class lacks.
    """
    inner = part.get_submodule(base)
    name = type(inner).__name__
    declared: Mapping[str, str] = part.config.get_text_config().base_model_tp_plan or {}
    if not declared:
        raise TypeError(f"{name} of transformers declares no base_model_tp_plan")
    if not kernel:
        raise TypeError(f"{name} of transformers computes attention itself")
    plan: dict[str, TensorStyle] = {}
    unknown: set[str] = set()
    for path, module in inner.named_modules():
        pattern = re.sub(r"\d+", "*", path)
        style = declared.get(pattern)
        unit = next((one for one in units if f"{base}.{path}".startswith(f"{one}.")), None)
        if style is None or unit is None:
            continue
        if style not in STYLES or not (isinstance(module, nn.Linear) or style not in ("colwise", "rowwise")):
            unknown.add(f"{pattern} ({style})")
            continue
        block = f"{base}.{path}".removeprefix(f"{unit}.").partition(".")[0]
        if f"{unit}.{block}" == f"{base}.{path}":
            unknown.add(f"{pattern} ({style}, outside of a block)")
        plan[f"{unit}.{block}"] = "gather"
        plan[f"{base}.{path}"] = STYLES[style]
    if unknown:
        raise TypeError(f"{name} of transformers plans {few(sorted(unknown), 4)}, which is not supported")
    _complete(part, base, units, plan)
    positional = Specialisation(_positional)
    for path, style in plan.items():
        module = part.get_submodule(path)
        if style == "gather" and not hasattr(module, "_by_position"):
            positional(module)
    return plan


def _complete(part: Any, base: str, units: tuple[str, ...], plan: dict[str, TensorStyle]) -> None:
    """Name what lies outside of blocks: norms work on each token alone, the embedding and the head are split."""
    blocks = [path for path, style in plan.items() if style == "gather"]
    for path, module in part.named_modules():
        own = [*module.parameters(recurse=False)]
        if not own or path in plan or any(path.startswith(f"{block}.") for block in blocks):
            continue
        if path.startswith("head."):
            if type(module) is nn.Linear:
                plan[path] = "logits"
        elif module is part.get_submodule(base).get_input_embeddings():
            plan[path] = "vocabulary"
        elif all(one.ndim == 1 for one in own):
            plan[path] = "sequence"
        else:
            raise TypeError(f"the plan of {type(part.get_submodule(base)).__name__} of transformers leaves {path} out")


def _positional(own: Any) -> Mapping[str, Any]:
    """A block of which the first argument is passed by position, as whoever gathers it expects."""

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        if not args:
            first = next(iter(keywords))
            args = (keywords.pop(first),)
        return own.__call__(self, *args, **keywords)

    return {"__call__": call, "_by_position": True}

"""The plan of tensor parallelism that a class of `transformers` declares, in Forge's styles."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from forge_train import Specialisation
from forge_train.ground.present import few
from forge_train.nn import Dropout, TensorStyle

log = logging.getLogger("forge_train")

STYLES: Mapping[str, TensorStyle] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicated_with_grad_allreduce": "heads",
}
"""transformers' style of a module inside a block → Forge's."""
BLOCKS = ("gather", "tokens", "summed")
"""Styles of blocks."""


def translated(part: Any, base: str, units: tuple[str, ...], *, kernel: bool, ranks: int) -> dict[str, TensorStyle]:
    """Module → style.

    Args:
        part: the model.
        base: the name of the model without its head.
        units: its blocks.
        kernel: whether the run's kernel computes attention; a class that computes it itself makes masks from the part
            of a sequence that it sees.
        ranks: that share one copy of the model.

    Raises:
        TypeError: saying what the class lacks.
    """
    name = type(part.get_submodule(base)).__name__
    declared: Mapping[str, str] = part.config.get_text_config().base_model_tp_plan or {}
    if not declared:
        raise TypeError(f"{name} of transformers declares no base_model_tp_plan")
    if not kernel:
        raise TypeError(f"{name} of transformers computes attention itself")
    plan, unknown = _read(part, base, units, declared)
    for block in _attention(part, units):
        if block in unknown or block not in plan:
            unknown.pop(block, None)
            plan = _without(plan, block) | {block: "summed"}
    for block, entries in unknown.items():
        if not _works_on_tokens(part.get_submodule(block)):
            raise TypeError(f"{name} of transformers plans {few(sorted(entries), 4)}, which is not supported")
        plan = _without(plan, block) | {block: "tokens"}
    _complete(part, base, plan)
    if "summed" in plan.values():
        log.info("Each rank computes the attention of %s whole: its plan splits it in no way of Forge's.", name)
    _specialise(part, plan, ranks)
    return plan


def _read(
    part: nn.Module, base: str, units: tuple[str, ...], declared: Mapping[str, str]
) -> tuple[dict[str, TensorStyle], dict[str, list[str]]]:
    """What is declared in styles that Forge has too, and block → what is declared for it in others."""
    plan: dict[str, TensorStyle] = {}
    unknown: dict[str, list[str]] = {}
    for path, one in (*part.named_modules(), *part.named_parameters()):
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path.removeprefix(f"{base}."))
        style = declared.get(pattern)
        unit = next((unit for unit in units if path.startswith(f"{unit}.")), None)
        if style is None or unit is None:
            continue
        block = f"{unit}.{path.removeprefix(f'{unit}.').partition('.')[0]}"
        known = STYLES.get(style)
        wanted = nn.Linear if known in ("colwise", "rowwise") else nn.Module
        if known is None or block == path or not isinstance(one, wanted):
            unknown.setdefault(block, []).append(f"{pattern} ({style})")
        else:
            plan |= {block: "gather", path: known}
    return plan, unknown


def _attention(part: nn.Module, units: tuple[str, ...]) -> list[str]:
    """The blocks whose attention goes through the run's kernel."""
    return [
        f"{unit}.{name}"
        for unit in units
        for name, block in part.get_submodule(unit).named_children()
        if any(map(_has_kernel, block.modules()))
    ]


def _has_kernel(module: nn.Module) -> bool:
    return hasattr(module, "kernel")


def _without(plan: Mapping[str, TensorStyle], block: str) -> dict[str, TensorStyle]:
    return {path: style for path, style in plan.items() if path != block and not path.startswith(f"{block}.")}


def _works_on_tokens(block: nn.Module) -> bool:
    """Whether a block computes each token alone, as feed-forward blocks do. Each rank can then have some of the tokens
    and the block's weights whole, where the class plans something that Forge has no style for."""
    mixes = any(_has_kernel(one) or isinstance(one, nn.Conv1d) for one in block.modules())
    return not mixes and any(True for _ in block.children())


def _complete(part: Any, base: str, plan: dict[str, TensorStyle]) -> None:
    """Name what lies outside of blocks: norms work on each token alone, the embedding and the head are split."""
    blocks = [path for path, style in plan.items() if style in BLOCKS]
    for path, module in part.named_modules():
        if isinstance(module, Dropout):
            if any(path.startswith(f"{block}.") for block in blocks):
                raise TypeError(
                    f"{type(part.get_submodule(base)).__name__} of transformers has dropout in a split block"
                )
            plan[path] = "sequence"
        own = [*module.parameters(recurse=False)]
        if not own or path in plan or any(path.startswith(f"{block}.") for block in blocks):
            continue
        if path.startswith("head."):
            if type(module) is nn.Linear:
                plan[path] = "logits"
        elif module is part.embedding:
            plan[path] = "vocabulary"
        elif all(one.ndim == 1 for one in own):
            plan[path] = "sequence"
        else:
            name = type(part.get_submodule(base)).__name__
            raise TypeError(f"the base_model_tp_plan of {name} of transformers leaves {path} out")


def _specialise(part: nn.Module, plan: Mapping[str, TensorStyle], ranks: int) -> None:
    """Have blocks do what their style expects of them, once."""
    positional, alike = Specialisation(_positional), Specialisation(_alike)
    for path, style in plan.items():
        module = part.get_submodule(path)
        if style in BLOCKS and not hasattr(module, "_by_position"):
            positional(module)
            if style == "summed":
                alike(module, ranks)
                for one in filter(_has_kernel, module.modules()):
                    one.heads, one.kv_heads = one.heads * ranks, one.kv_heads * ranks  # each rank has them all


def _positional(own: Any) -> Mapping[str, Any]:
    """A block whose first argument is always passed by position, as the gather of its input expects."""

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        if not args:
            first = next(iter(keywords))
            args = (keywords.pop(first),)
        return own.__call__(self, *args, **keywords)

    return {"__call__": call, "_by_position": True}


def _alike(own: Any, ranks: int) -> Mapping[str, Any]:
    """A block that every rank computes whole. Each gives an equal part of the sum that `summed` makes, so that all
    gradients are parts of sums too."""

    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        out = own.forward(self, *args, **keywords)
        return (out[0] / ranks, *out[1:]) if isinstance(out, tuple) else out / ranks

    return {"forward": forward}

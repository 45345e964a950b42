"""The plan of tensor parallelism that a class of `transformers` declares, in Forge's styles."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_train.base.format import format_list
from forge_train_kit.model import Dropout, TensorStyle
from forge_train_kit.specialisation import Specialisation

log = logging.getLogger("forge_train")

STYLES: Mapping[str, TensorStyle] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicated_with_grad_allreduce": "heads",
}
"""transformers' style of a module inside a block → Forge's."""
BLOCKS = ("gather", "tokens", "summed")
"""Styles of blocks."""


def translated(
    part: Any, base: str, units: tuple[str, ...], *, kernel: bool, piece: tuple[int, int]
) -> dict[str, TensorStyle]:
    """Module → style.

    Args:
        part: the model.
        base: the name of the model without its head.
        units: its blocks.
        kernel: whether the run's kernel computes attention; a class that computes it itself makes masks from the part
            of a sequence that it sees.
        piece: this rank's index among those that share one copy of the model, and their number.

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
            raise TypeError(f"{name} of transformers plans {format_list(sorted(entries), 4)}, which is not supported")
        plan = _without(plan, block) | {block: "tokens"}
    _complete(part, base, plan)
    if "summed" in plan.values():
        log.info(
            "Each rank computes all attention of %s: its base_model_tp_plan splits it in no way that Forge has.", name
        )
    _specialise(part, plan, piece)
    return plan


def _read(
    part: nn.Module, base: str, units: tuple[str, ...], declared: Mapping[str, str]
) -> tuple[dict[str, TensorStyle], dict[str, list[str]]]:
    """Read the declared styles that Forge has, and block → declarations in other styles."""
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
    """Return True if a block computes each token alone, as feed-forward blocks do. Each rank can then take some of the
    tokens and keep the block's weights whole, where Forge has no style for the class's plan."""
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


def _specialise(part: nn.Module, plan: Mapping[str, TensorStyle], piece: tuple[int, int]) -> None:
    """Have blocks do what their style expects of them, once."""
    positional, in_parts = Specialisation(_positional), Specialisation(_in_parts)
    for path, style in plan.items():
        module = part.get_submodule(path)
        if style in BLOCKS and not hasattr(module, "_by_position"):
            positional(module)
            if style == "summed":
                in_parts(module, piece)
                for one in filter(_has_kernel, module.modules()):
                    target: Any = one  # who divides the heads by the number of ranks gets those of this rank: all
                    target.heads, target.kv_heads = target.heads * piece[1], target.kv_heads * piece[1]


def _positional(own: Any) -> Mapping[str, Any]:
    """A block whose first argument is always passed by position, as the gather of its input expects."""

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        if not args:
            first = next(iter(keywords))
            args = (keywords.pop(first),)
        return own.__call__(self, *args, **keywords)

    return {"__call__": call, "_by_position": True}


def _in_parts(own: Any, piece: tuple[int, int]) -> Mapping[str, Any]:
    """A block that every rank computes whole, of which each gives its piece of the tokens to the sum that `summed`
    makes. So the gradients of its weights are parts of sums too."""

    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        out = own.forward(self, *args, **keywords)
        return (_only(out[0], *piece), *out[1:]) if isinstance(out, tuple) else _only(out, *piece)

    return {"forward": forward}


def _only(x: Tensor, at: int, pieces: int) -> Tensor:
    """`[batch, sequence, dim]` with zeros in all pieces of the sequence but one."""
    each = -(-x.shape[1] // pieces)
    elsewhere = torch.arange(x.shape[1], device=x.device) // each != at
    return x.masked_fill(elsewhere.unsqueeze(1), 0.0)

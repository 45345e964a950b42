"""The plan of tensor parallelism that a class of `transformers` declares, in Forge's styles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from forge_train import Specialisation
from forge_train.ground.present import few
from forge_train.nn import Dropout, TensorStyle

STYLES: Mapping[str, TensorStyle] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicated_with_grad_allreduce": "heads",
}
"""transformers' style of a module inside a block → Forge's."""
BLOCKS = ("gather", "tokens")
"""Styles of blocks."""


def translated(part: Any, base: str, units: tuple[str, ...], *, kernel: bool) -> dict[str, TensorStyle]:
    """Module → style.

    Args:
        part: the model.
        base: the name of the model without its head.
        units: its blocks.
        kernel: whether the run's kernel computes attention; a class that computes it itself makes masks from the part
            of a sequence that it sees.

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
    unknown: dict[str, list[str]] = {}
    for path, module in inner.named_modules():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        style = declared.get(pattern)
        unit = next((one for one in units if f"{base}.{path}".startswith(f"{one}.")), None)
        if style is None or unit is None:
            continue
        block = f"{unit}.{f'{base}.{path}'.removeprefix(f'{unit}.').partition('.')[0]}"
        known = STYLES.get(style)
        splits = known in ("colwise", "rowwise")
        if known is None or block == f"{base}.{path}" or (splits and not isinstance(module, nn.Linear)):
            unknown.setdefault(block, []).append(f"{pattern} ({style})")
        else:
            plan |= {block: "gather", f"{base}.{path}": known}
    for block, entries in unknown.items():
        if not _works_on_tokens(part.get_submodule(block)):
            raise TypeError(f"{name} of transformers plans {few(sorted(entries), 4)}, which is not supported")
        plan = {path: style for path, style in plan.items() if path != block and not path.startswith(f"{block}.")}
        plan[block] = "tokens"
    _complete(part, base, plan)
    positional = Specialisation(_positional)
    for path, style in plan.items():
        module = part.get_submodule(path)
        if style in BLOCKS and not hasattr(module, "_by_position"):
            positional(module)
    return plan


def _works_on_tokens(block: nn.Module) -> bool:
    """Whether a block computes each token alone, as feed-forward blocks do. Each rank can then have some of the tokens
    and the block's weights whole, where the class plans something that Forge has no style for."""
    mixes = any(hasattr(one, "kernel") or isinstance(one, nn.Conv1d) for one in block.modules())
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
            raise TypeError(f"the plan of {type(part.get_submodule(base)).__name__} of transformers leaves {path} out")


def _positional(own: Any) -> Mapping[str, Any]:
    """A block whose first argument is always passed by position, as the gather of its input expects."""

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        if not args:
            first = next(iter(keywords))
            args = (keywords.pop(first),)
        return own.__call__(self, *args, **keywords)

    return {"__call__": call, "_by_position": True}

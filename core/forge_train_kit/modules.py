"""Replacement of a model's modules, and the hooks that they carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train.base.errors import PluginError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["swap"]


HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Attributes in which `torch.nn.Module` stores its hooks, by hook id."""


def swap(part: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the submodule at `path` by `new`, carrying its forward and backward hooks and its training mode over.

    torchao's own conversion builds a new module and drops the hooks that tensor parallelism put on the old one.

    Raises:
        PluginError: if there is no module at `path`, or `path` is the part itself.
    """
    parent_path, _, name = path.rpartition(".")
    try:
        parent = part.get_submodule(parent_path)
        old = parent.get_submodule(name) if name else None
    except AttributeError:
        old = None
    if old is None:
        raise PluginError(f"swap: the model has no module {path!r} to replace.")
    for hooks in HOOK_TABLES:
        table = getattr(new, hooks, None)
        if table is not None:
            table.update(getattr(old, hooks))
    if old._is_full_backward_hook is not None:  # decides how torch calls what is in `_backward_hooks`
        new._is_full_backward_hook = old._is_full_backward_hook
    new.train(old.training)
    parent.register_module(name, new)

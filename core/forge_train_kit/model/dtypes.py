"""Modules that compute in a dtype of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def dtype_borders(part: nn.Module, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Modules whose `compute_dtype` is not that of the module around them.

    A module that declares `compute_dtype` (a torch.dtype) reads its weights in it. A transform that covers `precision`
    has to do so. Lists and dictionaries of modules are looked through, since nobody calls them.

    Args:
        part: of the model.
        dtype: of the run, which all others compute in.

    Returns:
        Global name → the module's own dtype, and that of what calls it; outer modules before those in them.
    """
    from torch.nn import ModuleDict, ModuleList

    found: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    seen: set[nn.Module] = set()

    def look(module: nn.Module, path: str, around: torch.dtype) -> None:
        for name, child in module.named_children():
            if child in seen:  # several modules share it, and its first name counts
                continue
            seen.add(child)
            called = not isinstance(child, (ModuleList, ModuleDict))
            own = getattr(child, "compute_dtype", around) if called else around
            if own is not around:
                found[path + name] = own, around
            look(child, f"{path}{name}.", own)

    look(part, "", dtype)
    return found

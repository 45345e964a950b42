"""A transform: the hook `parallelize`."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING

from forge_train import Applied, Phase, Plugin, Transform, hookimpl, section

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Job


class FrozenNorms(Plugin):
    """Keeps parameters at their initial values: norms by default."""

    api = (1, 0)

    @section
    class Config:
        names: tuple[str, ...] = ("*norm*",)
        """Patterns of parameter names, `*` for anything."""

    config: Config

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        return Transform(Phase.ADAPT, "frozen_norms", self._apply)

    def _apply(self, part: nn.Module) -> Applied:
        matched = {
            name: parameter
            for name, parameter in part.named_parameters()
            if any(fnmatch(name, pattern) for pattern in self.config.names)
        }
        for parameter in matched.values():
            parameter.requires_grad_(False)
        return Applied(part, tuple(matched), f"{sum(p.numel() for p in matched.values())} values frozen")

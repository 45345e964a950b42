"""Expert parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train import Phase, Plugin, Transform, hookimpl

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Applied, Job


class ExpertParallel(Plugin):
    """Spreads the experts of each layer over ranks, each of which works on its own data (arXiv:2006.16668)."""

    api = (1, 0)
    layout = True
    provides = ("ep",)
    requires = ("token_dispatch",)
    facts = {"plan.per_unit": True, "check.example": ("plugins=moe",), "plan.search": ("",)}

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        if job.dist.layout.ep == job.dist.layout.etp == 1:
            return None

        def apply(part: nn.Module) -> Applied:
            from ._ep import spread

            return spread(part, job.dist)

        return Transform(Phase.EXPERT, "ep", apply, covers=("ep", "etp"))

"""What the tests of narrow state have several ranks do, and stale masters, for `forge verify` to find."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_train import hookimpl
from forge_train.nn import NarrowState
from forge_train.nn.stochastic import rounded
from forge_train_plugins.optimizers.adamw import AdamW


def rounded_alike() -> dict[str, bool]:
    """Whether shards of several kinds are rounded as the whole tensor is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    lines, table = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    kinds: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
        "rows": (lines, [Shard(0)], (8, 6)),
        "columns": (lines, [Shard(1)], (6, 8)),
        "both": (table, [Shard(1), Shard(0)], (6, 8)),
        "uneven": (lines, [Shard(0)], (5, 3, 2)),
    }
    found = {}
    for name, (mesh, places, shape) in kinds.items():
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        shards: Any = rounded(distribute_tensor(whole, mesh, places), 7, name)
        found[name] = torch.equal(shards.full_tensor(), rounded(whole, 7, name))
    return found


class _Stale(NarrowState):
    """Forgets what became of the master."""

    def _narrow(self, parameter: Tensor, wide: Tensor) -> None:
        before = parameter.detach().float()
        super()._narrow(parameter, wide)
        self.state[parameter]["master"] = before


class StaleMasters(AdamW):
    """Does not update its masters on several ranks."""

    @hookimpl
    def optimizer(self, model: Any, job: Any) -> torch.optim.Optimizer:
        made = super().optimizer(model, job)
        if job.dist.world > 1:
            made.__class__ = _Stale
        return made

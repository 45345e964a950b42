"""What the tests of narrow state have several ranks do, and stale masters, for `forge verify` to find."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_train import hookimpl
from forge_train_kit.optim import NarrowState
from forge_train_kit.optim.quantised import Codes
from forge_train_kit.optim.stochastic import rounded
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


def quantised_alike() -> dict[str, bool]:
    """Whether shards of several kinds are quantised as the whole tensor is, and read back from scales that were loaded
    in full."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    lines, table = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    kinds: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
        "rows": (lines, [Shard(0)], (8, 131)),
        "uneven": (lines, [Shard(0)], (5, 3, 200)),
        "columns, whole blocks": (lines, [Shard(1)], (6, 1024)),
        "columns, cut blocks": (lines, [Shard(1)], (6, 301)),
        "columns, none on the last rank": (lines, [Shard(1)], (6, 9)),
        "both": (table, [Shard(1), Shard(0)], (7, 200)),
        "columns twice": (table, [Shard(1), Shard(1)], (6, 404)),
        "a stack": (table, [Shard(0), Shard(1)], (3, 5, 130)),
    }
    found = {}
    for name, (mesh, places, shape) in kinds.items():
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for bits, signed in ((8, True), (8, False), (4, True), (4, False)):
            table_of = Codes(bits, signed=signed)
            values = whole if signed else whole.square()
            sharded: Any = distribute_tensor(values, mesh, places)
            right = table_of.quantised(values, 7, name)
            codes, scales = table_of.quantised(sharded, 7, name)
            wide = table_of.widened(*right, values)
            loaded = [scales, right[1], distribute_tensor(right[1], mesh, [Replicate()] * mesh.ndim)]
            reads = [table_of.widened(codes, one, sharded).full_tensor() for one in loaded]  # type: ignore[attr-defined]
            alike = torch.equal(scales.full_tensor(), right[1])  # type: ignore[attr-defined]
            found[f"{name}, {bits} {signed}"] = alike and all(torch.equal(one, wide) for one in reads)
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

"""What ranks do for the laws: see test_laws.py. Each case gives JSON."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

import toys
from forge_train import Applied, ConfigError, Phase, Plugin, Transform, hookimpl
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train_tools.testing import joined, run_forge
from hot_path import Watch, counting, waits
from layouts import Replicas


def orders(folder: str) -> list[str]:
    """The composition, as it was written down, for every order in which three plugins can be asked for."""
    found = []
    for number, names in enumerate(itertools.permutations(("fsdp2", "tp", "ac"))):
        config = {"parallel.tp": 2, "checkpoint.every": 0}
        run = run_forge(names, config, steps=1, folder=Path(folder), name=f"order-{number}")
        found.append((run.run / "composition.json").read_text(encoding="utf-8"))
    return found


def reads(folder: str, name: str, plugins: list[str], **config: Any) -> dict[str, int]:
    """What the host read from tensors in six steps that were not logged: `method file` → how often."""
    settings = {
        "log.every": 4,
        **{key.replace("__", "."): value for key, value in config.items()},
    }
    with counting(4) as found:
        run_forge([Watch, "ema", *plugins], settings, steps=12, folder=Path(folder), name=name)
    counts: dict[str, int] = {}
    for (method, place), count in waits(found).items():
        key = f"{method} {place.partition(':')[0]}"
        counts[key] = counts.get(key, 0) + count
    return counts


class Claims(Plugin):
    """Matches something on one rank, on all, or on none."""

    api = (1, 0)
    ranks: tuple[int, ...] = ()

    @hookimpl
    def parallelize(self, job: Any) -> Transform:
        def apply(part: nn.Module) -> Applied:
            return Applied(part, ("head",) if job.dist.rank in self.ranks else ())

        return Transform(Phase.ADAPT, "claims", apply)


class ClaimsOnRank1(Claims):
    """What lies on another rank's part of the model, say."""

    ranks = (1,)


def ignored(folder: str) -> dict[str, str]:
    """What several ranks say of what has no effect."""
    said = {}
    for name, plugins, config in (
        ("nothing", (Replicas, Claims), {}),
        ("one rank", (Replicas, ClaimsOnRank1), {}),
        ("axis", (Replicas,), {"parallel.tp": 2}),
    ):
        try:
            settings = {"train.micro_batch": 1, **config}
            run = toys.run(Path(folder), *plugins, steps=1, config=settings, name=name, without=["fsdp2"])
            matched = [line["matched"] for line in json.loads((run.run / "composition.json").read_text())]
            said[name] = str(matched[0])
        except ConfigError as error:
            said[name] = str(error)
            dist.barrier()  # rank 0 is done with the folder
            assert not (Path(folder) / name).exists()
    return said


def disagreeing() -> str:
    """Every rank but the first has another value, one of them another plugin too."""
    rank = dist.get_rank()
    with DistributedContext.join(Layout(dp_shard=dist.get_world_size()), "cpu") as context:
        what = {"train.steps": 5 if rank == 0 else 6, "plugin lion": {"version": "1"} if rank == 2 else None}
        try:
            context.agree(what)
        except ConfigError as error:
            return str(error)
    return ""


def layouts_in_turn(folder: str) -> list[list[float]]:
    """The losses of one layout after the other, each in a process group of its own."""
    experts = {"moe.experts": 8, "parallel.ep": 2, "train.micro_batch": 1, "checkpoint.every": 0}
    layouts = [(("moe", "ep", "tp"), {**experts, "parallel.tp": 2}), (("moe", "ep", "fsdp2"), experts)]
    losses = []
    joined.leave()
    with patch.dict(os.environ, TORCHELASTIC_USE_AGENT_STORE="True"):
        for number, (plugins, config) in enumerate([*layouts, layouts[0]]):
            losses.append(run_forge(plugins, config, steps=2, folder=Path(folder), name=f"in-turn-{number}").losses)
    return losses

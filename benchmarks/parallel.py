"""FSDP2 and tensor parallelism through forge, and written by hand, one after the other in the same processes.

`measure` is what each rank of a `forge_train.testing.Pool` runs; see run.py.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from probes import SHAPE, skeleton
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from forge_train import Plugin, StepResult, hookimpl
from forge_train.composition.initialise import materialise
from forge_train.testing import run_forge

STEPS, WARM_UP = 11, 3
BATCH, SEQUENCE = 4, 256


class Clock:
    """CPU seconds of this process, all its threads together, between the end of the warm-up and the last step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def step(self, number: int) -> None:
        if number == WARM_UP:
            self.seconds = -time.process_time()
        if number == STEPS:
            self.seconds += time.process_time()


def measure(kind: str, how: str) -> float:
    """Train, `by_hand` or `forge`; this rank's CPU seconds."""
    clock = Clock()
    if how == "forge":
        forge(kind, clock)
    else:
        by_hand(kind, clock)
    return clock.seconds


def forge(kind: str, clock: Clock) -> None:
    """A run with its loggers on."""

    class Timed(Plugin):
        """Looks at the clock."""

        api = (1, 0)

        @hookimpl
        def on_step(self, step: StepResult) -> None:
            clock.step(step.step)

    world = dist.get_world_size()
    tp = world if kind == "tp" else 1
    mine = (f"train.micro_batch={BATCH * tp // world}", f"train.sequence={SEQUENCE}", f"parallel.tp={tp}")
    sets = (*SHAPE, *mine, "checkpoint.every=0", "log.every=10")
    with tempfile.TemporaryDirectory() as folder:
        plugins = [kind, "console", "tensorboard", Timed]
        run_forge(plugins, steps=STEPS, sets=sets, preset="", folder=Path(folder))


def by_hand(kind: str, clock: Clock) -> None:
    """The same model and sizes in plain torch: AdamW, clipping, a look at the loss every ten steps."""
    torch.manual_seed(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=(kind,))
    model = skeleton()
    forward: Callable[[Tensor, Tensor], Tensor] = {"fsdp2": _fsdp2, "tp": _tp}[kind](model, mesh)
    materialise(model, torch.device("cpu"), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = [torch.randint(0, 256, (BATCH, SEQUENCE + 1)) for _ in range(4)]
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world) if kind == "fsdp2" else slice(None)
    for step in range(1, STEPS + 1):
        tokens = batches[step % 4][mine]
        loss = forward(tokens[:, :-1], tokens[:, 1:].flatten())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            loss.item()
        clock.step(step)


def _fsdp2(model: Any, mesh: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A group for each block, for the embedding, for the head, and for the rest."""
    from torch.distributed.fsdp import fully_shard

    for module in (*model.layers.values(), model.embedding):
        fully_shard(module, mesh=mesh)
    fully_shard(model.head, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model.head(model(inputs)).flatten(0, 1), labels)
        loss.backward()
        return loss

    return step


def _tp(model: Any, mesh: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """torch's own recipe: sequence parallelism, and a loss from logits that stay split."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for name in model.layers:
        for block, (into, out) in {"attention": ("qkv", "o"), "feed_forward": (("gate", "up"), "down")}.items():
            here = f"layers.{name}.{block}"
            plan[f"{here}_norm"] = SequenceParallel()
            plan[here] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {f"{here}.{one}": ColwiseParallel() for one in into}
            plan[f"{here}.{out}"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, plan)

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        with loss_parallel():
            loss = nn.functional.cross_entropy(model.head(model(inputs)).flatten(0, 1), labels)
            loss.backward()
        return loss

    return step

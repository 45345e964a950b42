"""FSDP2 and tensor parallelism through forge, and written by hand, one after the other in the same processes.

`measure` is what each rank of a `forge_train_tools.testing.Pool` runs; see run.py.
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
from forge_train.compose.initialise import materialise
from forge_train_tools.testing import run_forge

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
    tp, pp = (world if kind == one else 1 for one in ("tp", "pp"))
    micro = 1 if kind == "pp" else BATCH * tp // world
    mine = (f"train.micro_batch={micro}", f"train.sequence={SEQUENCE}", f"parallel.tp={tp}", f"parallel.pp={pp}")
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
    if kind == "pp":
        _pipeline(model, clock)
        return
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


def _pipeline(model: Any, clock: Clock) -> None:
    """torch's own stages and 1F1B, cut where forge cuts."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from forge_train_kit.pipeline.cuts import balanced
    from forge_train_plugins.parallel._pp import cutting

    world, rank = dist.get_world_size(), dist.get_rank()
    costs = [cutting._cost(cutting._part(model, model.stages, range(at, at + 1)), SEQUENCE) for at in range(8)]
    cuts = balanced(costs, world)
    part: Any = cutting._part(model, model.stages, range(cuts[rank], cuts[rank + 1]))
    materialise(part, torch.device("cpu"), 0)
    if part.head is not None:
        part.register_forward_hook(lambda _, __, hidden: part.head(hidden))
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3, fused=True)
    batches = [torch.randint(0, 256, (BATCH, SEQUENCE + 1)) for _ in range(4)]
    ids, hidden = torch.zeros(1, SEQUENCE, dtype=torch.int64), torch.zeros(1, SEQUENCE, 256, requires_grad=True)
    given, out = hidden if rank else ids, hidden if rank < world - 1 else torch.zeros(1, SEQUENCE, 2048)
    stage = PipelineStage(part, rank, world, torch.device("cpu"), input_args=given, output_args=out)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    schedule = Schedule1F1B(stage, n_microbatches=BATCH, loss_fn=loss_of)
    for step in range(1, STEPS + 1):
        tokens, losses = batches[step % 4], list[Tensor]()
        if rank == 0:
            schedule.step(tokens[:, :-1])
        elif rank == world - 1:
            schedule.step(target=tokens[:, 1:], losses=losses)
        else:
            schedule.step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in part.parameters()]) ** 2
        dist.all_reduce(norm)
        torch.nn.utils.clip_grads_with_norm_(part.parameters(), 1.0, norm.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and losses:
            losses[0].item()
        clock.step(step)

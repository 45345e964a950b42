"""What Muon costs: on one process against `torch.optim.Muon`, and on four ranks against a quarter of one's iteration;
and what AdamW's state costs in fewer bits.

    python benchmarks/optimizers.py

`benchmarks/run.py optimizers` calls this and writes the table.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn

from forge_train.mesh.tensors import held_bytes
from forge_train_kit.optim import AtRest, MatrixOptimizer, NarrowState, state_of
from forge_train_kit.sections import StateDtype
from forge_train_plugins.optimizers._muon.newton_schulz import orthogonalise
from forge_train_plugins.optimizers._muon.rule import Orthogonal

COUNT, ROWS, COLUMNS, RANKS = 24, 512, 2048, 4
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True}


def rule() -> Orthogonal:
    return Orthogonal(coefficients="quintic", steps=5, dtype=torch.bfloat16, eps=1e-7, scale="rms")


def matrices() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(ROWS, COLUMNS)) for _ in range(COUNT)]
    for one in made:
        one.grad = torch.randn(ROWS, COLUMNS)
    return made


def seconds(*works: Callable[[], Any], times: int = 8) -> list[float]:
    """The least CPU time of several kinds of work, taken in turns, after one of each to warm up."""
    best = [float("inf")] * len(works)
    for turn in range(times + 1):
        for index, work in enumerate(works):
            before = time.process_time()
            work()
            if turn:
                best[index] = min(best[index], time.process_time() - before)
    return best


def one_process() -> dict[str, float]:
    """Speed over torch's, and CPU seconds of the iterations alone."""
    mine = MatrixOptimizer([{"params": matrices(), **SETTINGS}], rule())
    theirs = torch.optim.Muon(matrices(), **SETTINGS, adjust_lr_fn="match_rms_adamw")
    momenta = torch.randn(COUNT, 1, ROWS, COLUMNS)

    def iterate() -> None:
        for one in momenta:
            orthogonalise(one.clone(), coefficients="quintic", steps=5, dtype=torch.bfloat16, eps=1e-7)

    own, other, iterations = seconds(mine.step, theirs.step, iterate)
    return {"speed": other / own, "step": own, "iterations": iterations}


def on_a_rank(rank: int, folder: str) -> None:
    """A step of one of four ranks over rows: CPU seconds with and without what is sent, bytes, and peak memory."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    sharded = []
    for one in matrices():
        parameter = nn.Parameter(distribute_tensor(one.data, mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(one.grad, mesh, [Shard(0)])
        sharded.append(parameter)
    optimizer = MatrixOptimizer([{"params": sharded, **SETTINGS}], rule(), rank=rank)
    sent, sending = [0], [0.0]
    original = dist.all_to_all_single

    def counting(output: Any, given: Any, into: Any, out_of: Any, group: Any = None) -> None:
        sent[0] += sum(out_of) - out_of[rank]
        before = time.process_time()
        original(output, given, into, out_of, group=group)
        sending[0] += time.process_time() - before

    best: dict[str, float] = {"cpu": float("inf")}
    with patch("torch.distributed.all_to_all_single", counting):
        for turn in range(5):
            sent[0], sending[0] = 0, 0.0
            dist.barrier()
            before = time.process_time()
            optimizer.step()
            cpu = time.process_time() - before
            if turn and cpu < best["cpu"]:
                best = {"cpu": cpu, "sending": sending[0], "sent": sent[0]}

    def waiting(*given: Any, **options: Any) -> None:
        original(*given, **options)
        time.sleep(0.05)  # until gloo's thread lets go of the buffers: what is freed there, the profiler doesn't see

    with patch("torch.distributed.all_to_all_single", waiting):
        best["peak"] = peak(optimizer.step)
    Path(folder, f"{rank}.json").write_text(json.dumps(best), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def peak(work: Callable[[], Any]) -> int:
    """Bytes that tensors held at most, beyond those that were there."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    held = most = 0
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):  # they come thread by thread
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def four_ranks(iterations: float) -> dict[str, float]:
    """The slowest rank's CPU time beyond what it spends on sending, over a quarter of one process's iterations; bytes
    over the least; extra memory in largest matrices."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_a_rank, (folder,), nprocs=RANKS)
        found = [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    least = 2 * COUNT * ROWS * COLUMNS * 2 * (1 - 1 / RANKS)  # bf16, there and back, but for the owner's own part
    return {
        "cpu": max(one["cpu"] - one["sending"] for one in found) / (iterations / RANKS),
        "bytes": sum(one["sent"] for one in found) / least,
        "memory": max(one["peak"] for one in found) / (ROWS * COLUMNS * 4),
    }


def state_in_bits() -> dict[str, list[float]]:
    """Dtype of both moments → bytes of AdamW's state for each parameter, and nanoseconds of CPU time of its step."""
    dtypes: tuple[StateDtype, ...] = ("fp32", "bf16", "8bit", "4bit")
    weights = matrices()[:4]
    names = {weight: str(number) for number, weight in enumerate(weights)}
    made: list[torch.optim.Optimizer] = []
    for dtype in dtypes:
        adamw = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        kept = AtRest(names, {"exp_avg": (dtype, True), "exp_avg_sq": (dtype, False)}, masters=True, seed=0)
        made.append(adamw if dtype == "fp32" else NarrowState(adamw, kept))
    taken = seconds(*(optimizer.step for optimizer in made), times=3)
    size = sum(weight.numel() for weight in weights)
    return {
        dtype: [held_bytes(state_of(optimizer)) / size, 1e9 * spent / size]
        for dtype, optimizer, spent in zip(dtypes, made, taken, strict=True)
    }


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    alone = one_process()
    print(json.dumps({**alone, **four_ranks(alone["iterations"]), "state": state_in_bits()}))


if __name__ == "__main__":
    main()

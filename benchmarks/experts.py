"""What experts cost: the grouped product against a loop, experts against a dense block of equal work, memory.

    python benchmarks/experts.py

`benchmarks/run.py experts` calls this and writes the table.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

from forge_train import Job, Plugin, hookimpl
from forge_train.contract.protocols import Span, SpanName
from forge_train_kit.layers import Layer
from forge_train_plugins.experts._alltoall.transport import Local
from forge_train_plugins.experts._moe.block import build
from forge_train_plugins.experts._moe.experts import Experts
from forge_train_plugins.experts.moe import MoE
from forge_train_plugins.feed_forward.swiglu import SwiGLU
from forge_train_tools.testing import run_forge

DIM, EXPERTS, TOKENS = 256, 16, 2048


def seconds(work: Callable[[], Any], other: Callable[[], Any], times: int = 15) -> tuple[float, float]:
    """The least CPU time of two kinds of work, taken in turns."""
    best = [float("inf"), float("inf")]
    for turn in range(times + 2):
        for index, one in enumerate((work, other)):
            before = time.process_time()
            one()
            if turn >= 2:
                best[index] = min(best[index], time.process_time() - before)
    return best[0], best[1]


def trained(module: Callable[..., Tensor], *inputs: Any) -> Callable[[], None]:
    """Forward and backward."""

    def once() -> None:
        inputs[0].grad = None
        if isinstance(module, nn.Module):
            module.zero_grad(set_to_none=True)
        out = module(*inputs)
        out.backward(torch.ones_like(out))

    return once


def product() -> tuple[float, float]:
    """How many times faster 32 experts are with one grouped product than in a loop, on 2,048 tokens, with gradients.

    The loops are that of transformers' Mixtral, and forge's own, which wastes nothing on slices of the weights.
    """
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    chosen = torch.randint(0, 32, (TOKENS, 1), generator=torch.Generator().manual_seed(0))
    sizes = chosen.flatten().bincount(minlength=32)
    theirs = MixtralExperts(MixtralConfig(hidden_size=DIM, intermediate_size=512, num_local_experts=32))
    grouped, loop = (Experts(32, DIM, 512, matmul=matmul) for matmul in ("grouped", "loop"))
    for experts in (theirs, grouped, loop):
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=0.02)
    x = torch.randn(TOKENS, DIM, requires_grad=True)
    ours = trained(grouped, x, sizes)
    best, slow = seconds(ours, trained(theirs, x, chosen, torch.ones(TOKENS, 1)), 5)
    again, plain = seconds(ours, trained(loop, x, sizes), 5)
    return slow / best, plain / again


def layer(**values: Any) -> nn.Module:
    """A feed-forward block with experts."""
    shape = Layer(index=0, num_layers=1, dim=DIM, heads=4, kv_heads=4, head_dim=64, ffn_dim=1024)
    one = SimpleNamespace(layout=SimpleNamespace(tp=1, etp=1, cp=1))
    job: Any = SimpleNamespace(hooks=SimpleNamespace(call=lambda *_: Local()), dist=one)
    made = build(MoE.Config(experts=EXPERTS, **values), shape, job, of=1)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.02)
    return made


def dense() -> nn.Module:
    shape = Layer(index=0, num_layers=1, dim=DIM, heads=4, kv_heads=4, head_dim=64, ffn_dim=1024)
    made: Any = SwiGLU(SwiGLU.Config()).feed_forward(shape, None)  # type: ignore[arg-type]
    return made  # type: ignore[no-any-return]


def step() -> float:
    """Tokens per CPU-second of training with experts over those of a dense model with equal active FLOPs."""
    values = {
        "decoder.dim": DIM,
        "decoder.layers": 4,
        "decoder.heads": 4,
        "decoder.hidden": 1024,
        "decoder.max_sequence": 256,
        "train.sequence": 256,
        "train.global_batch": 8,
        "train.micro_batch": 8,
        "train.evaluate_every": 0,
        "checkpoint.every": 0,
    }
    taken: dict[str, float] = {}
    for _ in range(3):
        for name, plugins, more in (("dense", [], {}), ("moe", ["moe"], {"moe.experts": EXPERTS})):
            with tempfile.TemporaryDirectory() as folder:
                run_forge([*plugins, Clock], {**values, **more}, steps=8, folder=Path(folder))
            taken[name] = min(taken.get(name, float("inf")), Clock.step)
    return taken["dense"] / taken["moe"]


class Clock(Plugin):
    """The least CPU time of a step."""

    api = (1, 0)
    step = float("inf")

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        Clock.step = float("inf")
        return clocked if span == "step" else None


@contextmanager
def clocked() -> Iterator[None]:
    before = time.process_time()
    yield
    Clock.step = min(Clock.step, time.process_time() - before)


def peak(work: Callable[[], Any]) -> int:
    """Bytes that tensors held at most."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    held = most = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def memory() -> tuple[float, float]:
    """Peak of dropless dispatch with all tokens on one expert: over that of an even load, in rows per assignment."""
    x = torch.randn(1, TOKENS, DIM, requires_grad=True)
    made = layer(balance=0.0)
    even = peak(trained(made, x))
    with torch.no_grad():
        made.routed.router.weight.zero_()  # type: ignore[union-attr]  # a tie: all tokens choose the same experts
    one = peak(trained(made, x))
    return one / even, one / (TOKENS * 2 * DIM * 4)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(8, 256, DIM, requires_grad=True)
    moe, plain = seconds(trained(layer(), x), trained(dense(), x.detach().requires_grad_()))
    (slow, loop), (ratio, rows) = product(), memory()
    found = {"product": slow, "own_loop": loop, "layer": plain / moe, "step": step()}
    print(json.dumps({**found, "memory_ratio": ratio, "memory_rows": rows}))


if __name__ == "__main__":
    main()

"""What a layer of `delta_net` costs beside one of `gqa` with `sdpa`, by the length of the sequence.

python benchmarks/linear_attention.py    writes benchmarks/results/linear-attention.md
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from attention import peak, seconds
from run import Row, table
from torch.profiler import profile

from forge_train.compose.initialise import materialise
from forge_train.plugin.job import Hooks
from forge_train_kit.layers import Layer
from forge_train_kit.model import RoPE
from forge_train_plugins.attention.delta_net import DeltaNet
from forge_train_plugins.attention.gqa import GQA
from forge_train_plugins.attention.sdpa import SDPA

RESULTS = Path(__file__).parent / "results" / "linear-attention.md"
DIM, HEADS, KV_HEADS, HEAD_DIM = 512, 8, 2, 64
LENGTHS = (512, 2048, 8192)
GENERATED = 16
"""Tokens over which a step of generation is timed."""


def layers(length: int) -> dict[str, Any]:
    """A layer of each kind, with weights."""
    job: Any = SimpleNamespace(device=torch.device("cpu"))
    kernel = SDPA(SDPA.Config()).attention_kernel(job)
    job.hooks = Hooks([], {}, {})  # nobody fills the slot, and the kernel is given
    job.hooks.call = lambda *_: kernel  # type: ignore[method-assign]
    layer = Layer(0, 1, DIM, HEADS, KV_HEADS, HEAD_DIM, 4 * DIM, rope=RoPE(HEAD_DIM, length=length + GENERATED))
    with torch.device("meta"):
        made = {
            "attention": GQA(None).attention(layer, job),
            "delta": DeltaNet(DeltaNet.Config()).attention(layer, job),
        }
    for one in made.values():
        materialise(one, torch.device("cpu"), 0)
    return made


def kept(layer: Any, length: int) -> int:
    """Bytes that a forward pass keeps for the backward pass."""
    x = torch.randn(1, length, DIM, requires_grad=True)
    with profile(profile_memory=True) as recorded:
        out = layer(x)
    results: Any = recorded.profiler.kineto_results
    held = sum(event.nbytes() for event in results.events() if event.name() == "[memory]")
    return int(held) - out.numel() * out.element_size()


def training(layer: Any, length: int) -> Callable[[], None]:
    x = torch.randn(1, length, DIM, requires_grad=True)
    return lambda: layer(x).sum().backward()


def generation(layer: Any, length: int) -> tuple[float, int]:
    """CPU seconds of a token after so many, and bytes of the cache."""
    cache = layer.new_cache(1, length + GENERATED)
    with torch.inference_mode():
        layer(torch.randn(1, length, DIM), cache=cache)
        before = time.process_time()
        for token in range(length, length + GENERATED):
            layer(torch.randn(1, 1, DIM), position_ids=torch.tensor([[token]]), cache=cache)
        taken = (time.process_time() - before) / GENERATED
    held = [x for value in vars(cache).values() for x in (value if isinstance(value, list) else [value])]
    return taken, sum(x.numel() * x.element_size() for x in held if isinstance(x, torch.Tensor))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for length in LENGTHS:
        made = layers(length)
        work = {name: training(layer, length) for name, layer in made.items()}
        taken, most = seconds(work, 3), {name: float(peak(one)) for name, one in work.items()}
        held = {name: float(kept(one, length)) for name, one in made.items()}
        after = {name: generation(layer, length) for name, layer in made.items()}
        of = f"{length:,} tokens"
        pairs = [
            (f"forward and backward, {of}: CPU time", taken, 1.0, "s"),
            (f"kept for the backward pass, {of}", held, 2**20, "MiB"),
            (f"forward and backward, {of}: peak memory", most, 2**20, "MiB"),
            (f"a generated token after {of}: CPU time", {k: one[0] for k, one in after.items()}, 1e-3, "ms"),
            (f"cache after {of}", {k: float(one[1]) for k, one in after.items()}, 2**20, "MiB"),
        ]
        for what, found, scale, unit in pairs:
            both = f"{found['delta'] / scale:.3g} {unit} against {found['attention'] / scale:.3g} {unit}"
            rows.append(Row(what, f"{both}: × {found['delta'] / found['attention']:.2f}", "—", True))
            print(rows[-1], flush=True)
    note = (
        "A layer of `delta_net` (chunks of 64) against one of `gqa` with `sdpa`, on one thread of a CPU, in fp32: "
        f"width {DIM}, {HEADS} heads of {HEAD_DIM} features, {KV_HEADS} key heads in `gqa`."
    )
    RESULTS.write_text(table(rows, "Linear attention", "python benchmarks/linear_attention.py", note), encoding="utf-8")


if __name__ == "__main__":
    main()

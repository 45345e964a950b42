"""What attention over packed documents costs: against a dense mask, and a step that keeps documents apart.

    python benchmarks/attention.py

`benchmarks/run.py attention` calls this and writes the table.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from torch.profiler import profile

from forge_train import Job, Plugin, hookimpl
from forge_train.contract.protocols import Span, SpanName
from forge_train_kit.layers import AttentionOptions
from forge_train_plugins.attention.flex import Flex
from forge_train_plugins.attention.packed import Varlen
from forge_train_plugins.attention.sdpa import SDPA
from forge_train_tools.testing import run_forge

STEP = 2048
"""Tokens."""
TOKENS, DOCUMENTS, HEADS, KV_HEADS, HEAD_DIM = 8192, 16, 8, 2, 64
KERNELS: dict[str, Any] = {"dense": SDPA, "varlen": Varlen, "flex": Flex}


def lengths() -> Tensor:
    """Sixteen documents of 64 to 1,344 tokens, 8,192 in all."""
    drawn = torch.rand(DOCUMENTS, generator=torch.Generator().manual_seed(0)) + 0.1
    sizes = (drawn / drawn.sum() * TOKENS).int()
    sizes[0] += TOKENS - sizes.sum()
    return sizes


def attention(name: str) -> Callable[[], None]:
    """Forward and backward of one layer, whose document bounds or mask are made anew as for a new batch."""
    job: Any = SimpleNamespace(device=torch.device("cpu"))
    plugin = KERNELS[name]
    kernel = plugin(plugin.Config()).attention_kernel(job)
    given = [torch.randn(1, TOKENS, heads, HEAD_DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    of_documents = torch.arange(DOCUMENTS).repeat_interleave(lengths())[None]

    def once() -> None:
        kernel(*given, AttentionOptions(document_ids=of_documents.clone())).sum().backward()

    return once


def seconds(work: dict[str, Callable[[], Any]], times: int) -> dict[str, float]:
    """The least CPU time of each, taken in turns."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(times):
        for name, one in work.items():
            before = time.process_time()
            one()
            best[name] = min(best[name], time.process_time() - before)
    return best


def peak(work: Callable[[], None]) -> int:
    """Bytes that torch's CPU allocator had given out at once, at most, beyond those at the start."""
    with profile(profile_memory=True) as recorded:
        work()
    results: Any = recorded.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    return int(max(accumulate(size for _, size in changes)))


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


def steps(folder: Path, sequence: int) -> dict[str, float]:
    """CPU seconds of a step on 2,048 tokens with `auto`, documents apart or not; and apart with a dense mask.

    A decoder of 4 layers of width 256; documents of 100 to 700 bytes.
    """
    text = folder / "short.jsonl"
    if not text.exists():
        source, at, lines = Path(os.__file__).parent.joinpath("typing.py").read_text(encoding="utf-8"), 0, []
        while at < len(source):
            size = 100 + at * 7919 % 600
            lines.append(json.dumps({"text": source[at : at + size]}))
            at += size
        text.write_text("\n".join(lines), encoding="utf-8")
    values = {
        "decoder.dim": 256,
        "decoder.layers": 4,
        "decoder.heads": 4,
        "decoder.kv_heads": 2,
        "decoder.max_sequence": sequence,
        "train.sequence": sequence,
        "train.global_batch": STEP // sequence,
        "train.micro_batch": STEP // sequence,
        "train.evaluate_every": 0,
        "checkpoint.every": 0,
        "text.path": str(text),
    }
    ways: dict[str, tuple[str, bool]] = {"joined": ("auto", False), "apart": ("auto", True), "dense": ("sdpa", True)}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(1):
        for name, (kernel, isolate) in ways.items():
            more = {"text.isolate": isolate, **({"auto.cache": str(folder / "cache")} if kernel == "auto" else {})}
            with tempfile.TemporaryDirectory() as run:
                run_forge([kernel, Clock], {**values, **more}, steps=4, folder=Path(run))
            best[name] = min(best[name], Clock.step)
    return best


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    work = {name: attention(name) for name in KERNELS}
    taken, held = seconds(work, 2), {name: peak(one) for name, one in work.items()}
    found: dict[str, float] = {"dense_seconds": taken["dense"], "dense_bytes": held["dense"]}
    for name in ("varlen", "flex"):
        found |= {f"{name}_time": taken[name] / taken["dense"], f"{name}_memory": held[name] / held["dense"]}
    with tempfile.TemporaryDirectory() as folder:
        for sequence in (256, 2048):
            best = steps(Path(folder), sequence)
            found[f"isolate_{sequence}"] = best["apart"] / best["joined"]
            found[f"dense_{sequence}"] = best["dense"] / best["joined"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Plugins and plain scripts that the benchmarks measure; each runs in a process of its own.

python benchmarks/probes.py (plain|forge)-(first|loop|compiled|transformers)|plain-loss|chunked-loss
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, SEQUENCE = 4, 512
SHAPE = (
    "decoder.dim=256",
    "decoder.layers=6",
    "decoder.heads=16",
    "decoder.hidden=768",
    "decoder.vocabulary=2048",
    f"train.sequence={SEQUENCE}",
    f"train.global_batch={BATCH}",
    f"train.micro_batch={BATCH}",
    "text.isolate=false",
    "cosine.warmup=2",
)
TRANSFORMERS = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 2048,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""A model of transformers of the same size, of a class without a family in Forge: StableLM."""
STEPS, WARM_UP = 16, 4


def report(**values: float) -> None:
    """Print what was measured, with the peak of this process's memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**values, "cpu": time.process_time(), "peak": peak}), flush=True)


def build() -> Any:
    """The benchmark's model, with weights."""
    import torch

    from forge_train.compose.initialise import materialise

    model = skeleton()
    materialise(model, torch.device("cpu"), 0)
    return model


def skeleton() -> Any:
    """The benchmark's model, 6 M parameters, made of forge's own modules but without forge's run; on meta."""
    import torch

    from forge_train_kit.layers import Layer
    from forge_train_kit.model import Embedding, Linear, RMSNorm, RoPE
    from forge_train_plugins.attention._gqa import GroupedQueryAttention
    from forge_train_plugins.attention._sdpa import Kernel
    from forge_train_plugins.feed_forward._swiglu import DenseFeedForward
    from forge_train_plugins.models._decoder.model import Block, Transformer

    rope = RoPE(16, length=4096)
    layer = Layer(index=0, num_layers=6, dim=256, heads=16, kv_heads=16, head_dim=16, ffn_dim=768, rope=rope)
    kernel = Kernel()
    with torch.device("meta"):
        blocks = [
            Block(GroupedQueryAttention(layer, kernel), DenseFeedForward(layer, "swiglu"), lambda: RMSNorm(256))
            for _ in range(6)
        ]
        return Transformer(Embedding(2048, 256), blocks, RMSNorm(256), Linear(256, 2048), max_sequence=4096, tied=False)


def foreign() -> Any:
    """The model of transformers, as the library builds it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model("stablelm", **TRANSFORMERS)).train()


def plain(steps: int, *, compiled: bool = False, transformers: bool = False) -> None:
    """A hand-written loop: AdamW, clipping, a look at the loss every ten steps; or the whole model and the loss
    compiled together, in bf16 by autocast; or a model of transformers."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(0)
    model = foreign() if transformers else build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = [torch.randint(0, 256, (BATCH, SEQUENCE + 1)) for _ in range(4)]

    def loss_of(tokens: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=compiled):
            inputs = tokens[:, :-1]
            logits = model(inputs, use_cache=False).logits if transformers else model.head(model(inputs))
        return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    once = torch.compile(loss_of) if compiled else loss_of
    started = time.process_time()
    for step in range(1, steps + 1):
        loss = once(batches[step % 4])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == WARM_UP:
            started = time.process_time()
        if step % 10 == 0:
            loss.item()
    report(loop=time.process_time() - started)


def forge(steps: int, *, first: bool, compiled: bool = False, transformers: bool = False) -> None:
    """The same through `forge train`, with its loggers on."""
    from forge_train_cli import main

    probe = "forge_train_benchmarks:FirstStep" if first else "forge_train_benchmarks:Loop"
    sys.modules["forge_train_benchmarks"] = sys.modules["__main__"]
    with tempfile.TemporaryDirectory() as folder:
        shape = [one for one in SHAPE if not (transformers and one.startswith("decoder."))]
        if transformers:
            values = ", ".join(f"{key} = {one}" for key, one in TRANSFORMERS.items() if one is not None)
            shape += ["hf.type=stablelm", f"hf.set={{ {values} }}"]
        settings = [part for value in (*shape, f"train.steps={max(steps, 3)}") for part in ("--set", value)]
        options = ["--run-dir", folder, "--plugins", probe]
        options += ["--plugins", "hf"] if transformers else []
        if compiled:
            options += ["--plugins", "compile", "--set", "train.precision=bf16"]
        (Path(folder) / "bench.toml").write_text("")
        sys.argv = ["forge", "train", str(Path(folder) / "bench.toml"), *options, *settings]
        main()


def loss(chunk: int) -> None:
    """Forward and backward of the loss alone: 2,048 tokens, 32,768 words, dim 256."""
    import torch

    from forge_train_kit.model import Linear
    from forge_train_plugins.tasks._cross_entropy import ChunkedCrossEntropy

    hidden = torch.randn(1, 2048, 256, requires_grad=True)
    head = Linear(256, 32768)
    labels = torch.randint(0, 32768, (1, 2048))
    ChunkedCrossEntropy(chunk=64)(hidden[:, :64], head, labels[:, :64]).backward()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ChunkedCrossEntropy(chunk=chunk)(hidden, head, labels).backward()
    report(extra=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base)


def __getattr__(name: str) -> Any:
    """The probe plugins, made when asked for: plain scripts here must not import forge."""
    if name not in ("FirstStep", "Loop"):
        raise AttributeError(name)
    from forge_train import Plugin, StepResult, hookimpl

    class FirstStep(Plugin):
        """Reports CPU time at the first finished step, and ends the process."""

        @hookimpl
        def on_step(self, step: StepResult) -> None:
            report()
            os._exit(0)

    class Loop(Plugin):
        """Reports CPU time between the end of the warm-up and the last step."""

        @hookimpl
        def on_step(self, step: StepResult) -> None:
            if step.step == WARM_UP:
                self.started = time.process_time()
            if step.step == STEPS:
                report(loop=time.process_time() - self.started)

    return {"FirstStep": FirstStep, "Loop": Loop}[name]


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    match sys.argv[1]:
        case "plain-first":
            plain(1)
        case "plain-loop":
            plain(STEPS)
        case "forge-first":
            forge(1, first=True)
        case "forge-loop":
            forge(STEPS, first=False)
        case "plain-compiled":
            plain(STEPS, compiled=True)
        case "forge-compiled":
            forge(STEPS, first=False, compiled=True)
        case "plain-transformers":
            plain(STEPS, transformers=True)
        case "forge-transformers":
            forge(STEPS, first=False, transformers=True)
        case "plain-loss":
            loss(1 << 30)
        case "chunked-loss":
            loss(0)

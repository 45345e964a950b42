"""What `lora` costs: memory beside its base, and a step beside one of `peft` in a plain loop; and a base in four bits.

    python benchmarks/lora.py                   # writes benchmarks/results/lora.md
    python benchmarks/lora.py forge|codes|peft  # one of the loops; prints CPU seconds

33 M parameters of Llama's shape; both loops train the same updates of the same weights on the same tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch

from forge_train import Job, Model, Plugin, StepResult, hookimpl
from forge_train.mesh.tensors import held_bytes
from forge_train_kit.model.block_codes import BlockTensor
from forge_train_tools import plan
from forge_train_tools.testing import run_forge

RESULTS = Path(__file__).parent / "results" / "lora.md"
DIM, LAYERS, HEADS, HIDDEN, WORDS = 512, 8, 8, 1408, 8192
BATCH, SEQUENCE, RANK = 2, 256, 16
STEPS, WARM_UP, TURNS = 8, 2, 3
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NOTE = "33 M parameters of Llama's shape in fp32, updates of all linears of rank 16, 2 × 256 tokens a step, by turns."


def config() -> dict[str, Any]:
    """Of the run that is measured."""
    return {
        "decoder.dim": DIM,
        "decoder.layers": LAYERS,
        "decoder.heads": HEADS,
        "decoder.hidden": HIDDEN,
        "decoder.vocabulary": WORDS,
        "decoder.max_sequence": SEQUENCE,
        "synthetic.vocabulary": WORDS,
        "synthetic.isolate": False,
        "train.sequence": SEQUENCE,
        "train.global_batch": BATCH,
        "train.micro_batch": BATCH,
        "train.evaluate_every": 0,
        "checkpoint.every": 0,
        "cosine.warmup": 2,
        "lora.rank": RANK,
        "train.init_missing": [],  # of random weights
        "checkpoint.only": [],
    }


class Measured(Plugin):
    """CPU time of the steps after the warm-up, and the bytes of a step after it."""

    api = (1, 0)
    seconds = held = most = trained = coded = 0.0

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.profile = model, optimizer, None

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        from torch.profiler import ProfilerActivity, profile

        if step.step == WARM_UP:
            self.seconds = -time.process_time()
        if step.step == STEPS:
            self.seconds += time.process_time()
            self._hold()
            self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profile.__enter__()
        if step.step == STEPS + 1:
            self.profile.__exit__(None, None, None)
            events = self.profile.profiler.kineto_results.events()
            now = 0
            for event in events:
                if event.name() == "[memory]":
                    now += event.nbytes()
                    self.most = max(self.most, now)

    def _hold(self) -> None:
        """Bytes of weights and of the optimizer's state, and the parameters that are trained."""
        weights = [*self.model.parameters()]
        states = [one for state in self.optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
        self.held = held_bytes([*weights, *states])
        coded = [one for one in weights if isinstance(one, BlockTensor)]
        self.coded = held_bytes(coded) / max(sum(one.numel() for one in coded), 1)
        self.trained = sum(one.numel() for one in weights if one.requires_grad)


def forge(**more: Any) -> None:
    values = config() | more
    with tempfile.TemporaryDirectory() as folder:
        run = run_forge(["synthetic", "lora", "lora:Measured"], values, steps=STEPS + 1, folder=Path(folder))
        seen = run.plugin("measured")
        memory = plan(run.run / "config.toml", without=["measured"]).memory
    found = {key: getattr(seen, key) for key in ("seconds", "held", "most", "trained", "coded")}
    planned = {"base": memory.parameters + memory.buffers, "activations": memory.activations, "planned": memory.peak}
    print(json.dumps(found | planned))


def codes() -> None:
    """With a base in four bits."""
    forge(**{"lora.base": "nf4", "lora.base_double": True})


def peft() -> None:
    """The same by hand."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        vocab_size=WORDS,
        tie_word_embeddings=False,
    )
    model = get_peft_model(LlamaForCausalLM(shape), LoraConfig(r=RANK, target_modules=list(LINEARS))).train()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    batches = [torch.randint(0, WORDS, (BATCH, SEQUENCE + 1)) for _ in range(4)]
    seconds = 0.0
    for step in range(1, STEPS + 1):
        tokens = batches[step % 4]
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == WARM_UP:
            seconds = -time.process_time()
    print(json.dumps({"seconds": seconds + time.process_time()}))


def measured(which: str) -> dict[str, float]:
    command = [sys.executable, __file__, which]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    from run import Row, table

    found: dict[str, list[dict[str, float]]] = {"forge": [], "codes": [], "peft": []}
    for _ in range(TURNS):
        for which, runs in found.items():
            runs.append(measured(which))
    seconds = {which: min(one["seconds"] for one in runs) for which, runs in found.items()}
    speed, last = seconds["peft"] / seconds["forge"], found["forge"][-1]
    allowed = last["base"] + 16 * last["trained"] + last["activations"]
    memory = (last["held"] + last["most"]) / allowed
    what = f"peak of all tensors / base + 16 bytes × {last['trained'] / 1e6:.2f} M updates + activations"
    slower, each = seconds["codes"] / seconds["forge"], found["codes"][-1]["coded"]
    rows = [
        Row("tokens per CPU-second, `lora` / `peft` in a plain loop", f"{speed:.3f}", "≥ 1.0", speed >= 1.0),
        Row(f"{what} as planned ({allowed / 2**20:.0f} MiB)", f"{memory:.3f}", "≤ 1.1", memory <= 1.1),
        Row("CPU time of a step, base in NF4 / in fp32", f"{slower:.3f}", "≤ 1.35", slower <= 1.35),
        Row("bytes of a weight in NF4, scales in 8 bits included", f"{each:.3f}", "≤ 0.60", each <= 0.6),
    ]
    for row in rows:
        print(f"{'ok  ' if row.ok else 'MISS'} {row.what}: {row.measured} (bar {row.bar})", flush=True)
    RESULTS.write_text(table(rows, "`lora`, on one process", "python benchmarks/lora.py", NOTE), encoding="utf-8")


if __name__ == "__main__":
    {"forge": forge, "codes": codes, "peft": peft}.get(sys.argv[1] if len(sys.argv) > 1 else "", main)()

"""Steps of `grpo`: answers that the model draws on the device, and what it learns of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from forge_train import MASKED, Batch
from forge_train.contract.batch import TOKENS
from forge_train_contrib._grpo.loader import ADVANTAGE, DRAWN
from forge_train_contrib._grpo.task import Answers
from forge_train_tools.testing import TinyRun, run_forge

from .attention import largest
from .case import Row, Size
from .machine import ROOT
from .runs import folder, small

sys.path.append(str(ROOT / "tests" / "contrib"))

import grpo_cases

NEAR = 1e-5
STEPS = 4


def steps(size: Size, temperature: float) -> list[Row]:
    """Fresh answers: their importance ratios are exactly 1; the first ones are those of the CPU."""
    torch.set_float32_matmul_precision("highest")
    looked, ones = 0, 0
    plain = Answers.loss

    def loss(self: Answers, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        nonlocal looked, ones
        total = plain(self, part, hidden, batch)
        learned = (batch.labels != MASKED).double()
        right = -(batch.targets[ADVANTAGE][:, None] * learned).sum()
        nothing = batch.with_targets({DRAWN: torch.full_like(batch.targets[DRAWN], torch.nan)}, axes=TOKENS)
        with torch.no_grad(), patch.object(self, "observed", lambda: None):
            again = plain(self, part, hidden, nothing)
        looked += 1
        ones += bool(total.equal(again)) and abs(float(total) - float(right)) <= 1e-12 * float(learned.sum())
        return total

    with folder() as one, folder() as other:
        right = run(size, "cpu", one, temperature, steps=1)
        with patch.object(Answers, "loss", loss):
            found = run(size, size.device, other, temperature, steps=STEPS)
        first = run(size, size.device, one, temperature, steps=1, **other_way(size))
    drift = largest([line["grpo.drift"] for line in found.metrics])
    drawn, wanted = (one.plugin("grpo").state_dict()["tokens"] for one in (first, right))
    same = int((drawn == wanted).all(1).sum())
    name = f"temperature {temperature:g}"
    return [
        Row(f"{name}: micro-batches whose ratios are all exactly 1", f"{ones} of {looked}", "all", 0 < ones == looked),
        Row(f"{name}: log-probabilities when drawn and when learned", f"{drift:.1e}", f"≤ {NEAR:.1e}", drift <= NEAR),
        Row(f"{name}: first answers that are the CPU's", f"{same} of {len(wanted)}", "all", same == len(wanted)),
    ]


def other_way(size: Size) -> dict[str, Any]:
    """On a CPU alone, another number of answers at once is what is compared."""
    return {} if size.device == "cuda" else {"grpo.batch": 3}


def run(size: Size, device: str, place: Path, temperature: float, steps: int, **more: Any) -> TinyRun:
    """Of `dapo`, whose loss is the sum over tokens of what their ratio multiplies."""
    own = {"grpo.variant": "dapo", "grpo.rounds": 1, "grpo.temperature": temperature, "grpo.chunk": 10**6}
    tokens = {"grpo.tokens": size.choose(16, 5), "train.global_batch": size.choose(16, 8)}
    values = {**small(size, **grpo_cases.settings(place)), **own, **tokens, "run.device": device, **more}
    return run_forge(["grpo"], values, steps=steps, name=f"{device}-{len(more)}", folder=place)

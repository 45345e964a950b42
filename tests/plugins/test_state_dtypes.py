"""Runs whose optimizer keeps its state in 8 and 4 bits come as far as with fp32."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from crossed import crossed, few
from forge_train_plugins.optimizers._torch_optimizer import MOMENTS
from forge_train_tools.testing import run_forge

pytestmark = [pytest.mark.timeout(200)]
SIZES = {"decoder.layers": 1, "decoder.dim": 64, "decoder.heads": 2, "decoder.kv_heads": 2, "decoder.hidden": 128}


@functools.cache
def loss(dtype: str) -> float:
    """Mean of the last ten steps of fifty, in which it falls from 5.6 to less than 3, of two seeds: from one to another
    a ratio of such means varies by some percent."""
    state = {"adamw.state.first": dtype, "adamw.state.second": dtype}
    settings = {**SIZES, **state, "adamw.lr": 0.01, "cosine.warmup": 5}
    runs = [run_forge(("adamw",), {**settings, "run.seed": seed}, steps=50) for seed in (0, 1)]
    for run in runs:
        assert any(key.endswith("bit") for held in run.optimizer.state.values() for key in held) == (dtype != "fp32")
    return sum(sum(run.losses[-10:]) for run in runs) / 20


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), few([("8bit", 1.02), ("4bit", 1.05)], [("4bit", 1.05)]))
def test_it_learns_as_fast(dtype: str, bound: float) -> None:
    print(loss("fp32"), loss(dtype))
    assert loss("fp32") < 3
    assert loss(dtype) <= bound * loss("fp32")


@pytest.mark.parametrize("name", MOMENTS)
def test_classes_of_torch_keep_their_moments_in_8_bits(name: str) -> None:
    """And go on as in fp32, nearly; masters of bf16 parameters come with it."""
    first, second = MOMENTS[name]
    options = {"momentum": 0.9} if name == "SGD" else {}
    config = {**SIZES, "torch_optimizer": {"name": f"torch.optim:{name}", "lr": 1e-3, "options": options}}
    state = {
        f"torch_optimizer.state.{moment}": "8bit" for moment, keys in (("first", first), ("second", second)) if keys
    }
    wide = run_forge(("torch_optimizer",), config, steps=5)
    run = run_forge(("torch_optimizer", "bf16_parameters"), {**config, **state, "train.precision": "bf16"}, steps=5)
    head = run.optimizer.state[dict(run.model.named_parameters())["head.weight"]]
    assert {"master", *(f"{keys[0]}_8bit" for keys in (first, second) if keys)} <= head.keys()
    assert run.losses[-1] == pytest.approx(wide.losses[-1], rel=0.03)


FP32 = {"first": "fp32", "second": "fp32"}
EIGHT = {"first": "8bit", "second": "8bit"}
FOUR = {"first": "4bit", "second": "4bit"}
BF16 = {"first": "bf16", "second": "bf16"}


CHANGES = [(EIGHT, FP32), (FOUR, FP32), (BF16, FP32), (FP32, EIGHT), (EIGHT, BF16), (BF16, FOUR)]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "change"), crossed(["adamw", "muon"], CHANGES))
def test_a_run_goes_on_in_another_dtype_if_it_is_asked_to(
    tmp_path: Path, optimizer: str, change: tuple[dict[str, str], dict[str, str]]
) -> None:
    before, after = change

    def take(state: dict[str, str], steps: int, **more: Any) -> Any:
        settings = {f"{optimizer}.state": state, "checkpoint.allow_changes": [f"{optimizer}.state"], **SIZES}
        return run_forge([optimizer], settings, steps=steps, folder=tmp_path, name="r", **more)

    take(before, 6, stop_at=3)
    resumed = take(after, 6)
    assert all(math.isfinite(loss) for loss in resumed.losses)
    whole = run_forge([optimizer], {f"{optimizer}.state": FP32, **SIZES}, steps=6, folder=tmp_path, name="w")
    assert resumed.losses[-1] == pytest.approx(whole.losses[-1], rel=0.02)
    if after is FP32:
        held = [one for state in resumed.optimizer.state.values() for one in state.values()]
        assert all(one.dtype == torch.float32 for one in held if isinstance(one, torch.Tensor))
        assert not any("roundings" in state or "exp_avg_8bit" in state for state in resumed.optimizer.state.values())

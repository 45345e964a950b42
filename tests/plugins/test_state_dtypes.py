"""Runs whose optimizer keeps its state in 8 and 4 bits come as far as with fp32."""

from __future__ import annotations

import functools

import pytest

from forge_train.testing import run_forge
from forge_train_plugins.optimizers._torch_optimizer import MOMENTS

pytestmark = [pytest.mark.accept("parts", 1), pytest.mark.timeout(200)]
SIZES = {"decoder.layers": 1, "decoder.dim": 64, "decoder.heads": 2, "decoder.kv_heads": 2, "decoder.hidden": 128}


@functools.cache
def loss(dtype: str) -> float:
    """Mean of the last ten steps of fifty, in which it falls from 5.6 to less than 3."""
    state = {"adamw.state.first": dtype, "adamw.state.second": dtype}
    run = run_forge(("adamw",), {**SIZES, **state, "adamw.lr": 0.01, "cosine.warmup": 5}, steps=50)
    assert any(key.endswith("bit") for held in run.optimizer.state.values() for key in held) == (dtype != "fp32")
    return sum(run.losses[-10:]) / 10


@pytest.mark.parametrize(("dtype", "bound"), [("8bit", 1.02), ("4bit", 1.05)])
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

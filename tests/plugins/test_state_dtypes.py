"""Runs whose optimizer keeps its state in 8 and 4 bits come as far as with fp32."""

from __future__ import annotations

import functools

import pytest

from forge_train.testing import run_forge

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

"""Every slot and chain can be filled from outside, alone and all of them together, without a change of core."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import outside
import outside_layers
from forge_train import Plugin
from forge_train.registry.declared import Specs
from forge_train_tools.testing import Installed, RunForge
from forge_train_tools.testing.bench import Bench
from forge_train_tools.testing.conformance import attempt
from forge_train_tools.testing.runs import prepared
from forge_train_tools.testing.trials import TRIALS

SPECS = Specs([])
"""Forge's own hooks."""

SLOTS = [name for name, spec in SPECS.items() if spec.kind in ("slot", "chain") and not spec.starts_only]
"""Without `initial_weights`, which only runs from other weights ask for: see test_initial_weights.py."""

CASES: dict[str, tuple[type[outside.Outside], ...]] = {
    "build_model": (outside_layers.OutsideModel,),
    "attention": (outside_layers.OutsideAttention,),
    "feed_forward": (outside_layers.OutsideFeedForward,),
    "head": (outside_layers.OutsideHead,),
    "tail": (outside_layers.OutsideTail,),
    "fusion": (outside_layers.OutsideFusion,),
    "attention_kernel": (outside_layers.OutsideKernel,),
    "token_dispatch": (outside_layers.OutsideDispatch, outside_layers.OutsideFeedForward),
    "build_data": (outside.OutsideData,),
    "tokenizer": (outside.OutsideTokenizer, outside.OutsideData),
    "classes": (outside.OutsideClasses, outside.OutsideData),
    "task": (outside.OutsideTask,),
    "loss": (outside.OutsideLoss,),
    "executor": (outside.OutsideExecutor,),
    "optimizer": (outside.OutsideOptimizer,),
    "lr_schedule": (outside.OutsideSchedule,),
    "loss_scale": (outside.OutsideScale,),
}
"""Slot → what fills it, and whom that needs beside it."""

DEFAULTS = {
    "build_model": "decoder",
    "head": "lm_head",
    "attention_kernel": "sdpa",
    "build_data": "text",
    "task": "next_token",
    "loss": "cross_entropy",
    "executor": "sequential",
    "optimizer": "adamw",
    "lr_schedule": "cosine",
}
"""Slot → the built-in plugin that must then be gone. Chains keep theirs, for the layers that nobody else claims."""


def test_every_slot_and_chain_has_a_case() -> None:
    assert CASES.keys() == set(SLOTS), "a slot or chain without a replacement from outside: add one to outside.py"


@pytest.mark.parametrize("slot", SLOTS)
def test_a_slot_is_filled_from_outside_and_that_is_what_is_used(slot: str, run_forge: RunForge) -> None:
    run = run_forge(CASES[slot], {"train.evaluate_every": 2})
    name = next(name for name, plugin in run.job.hooks.plugins.items() if type(plugin) is CASES[slot][0])
    assert run.plugin(name).uses > 0
    assert run.finished.outcome == "done"
    if SPECS[slot].kind == "slot":
        assert run.job.hooks.provider(slot) == name
    assert DEFAULTS.get(slot) not in run.job.hooks.enabled


def test_forge_trains_with_every_slot_filled_from_outside(forge_plugins: Installed, run_forge: RunForge) -> None:
    everything: list[type[Plugin]] = [plugins[0] for plugins in CASES.values()]
    assert forge_plugins.names() == []
    without = ("gqa", "swiglu")  # a chain's default stays for the layers that nobody claims, unless it is left out
    run = run_forge(everything, {"train.evaluate_every": 2}, steps=4, without=without)
    assert run.finished.outcome == "done"
    assert {type(plugin) for plugin in run.job.hooks.plugins.values()} == set(everything)
    assert all(plugin.uses for plugin in run.job.hooks.plugins.values())  # type: ignore[attr-defined]
    run_forge(everything, steps=4, without=without, name="stopped", stop_at=2)
    assert run_forge(everything, steps=4, without=without, name="stopped").numbers == run.numbers


@pytest.mark.parametrize("slot", SLOTS)
def test_what_fills_a_slot_satisfies_its_protocol(slot: str, tmp_path: Path) -> None:
    with prepared(CASES[slot], folder=tmp_path) as setup:
        enabled = next(one for one in setup.hooks.enabled.values() if one.cls is CASES[slot][0])
        bench = Bench(setup, enabled, tmp_path)
        done = [attempt(name, partial(bench.make, trial)) for name, trial in TRIALS[slot]]
    assert done
    assert not [check for check in done if check.status not in ("ok", "warn")]

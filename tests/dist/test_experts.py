"""Experts over ranks: every layout equals one process, in gradients, router biases and checkpoints."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from crossed import few, marked
from forge_train import ConfigError, ForgeError
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.planning import plan
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]
STEPS = 2
EXPERTS = {"moe.experts": 8, "moe.hidden": 16, "moe.bias_speed": 0.01, "moe.z_loss": 0.001, "moe.shared": 1}
BATCH = {"train.global_batch": 8, "train.micro_batch": 2}


def request(file: Path, *plugins: str, **values: Any) -> Request:
    settings = {**EXPERTS, **BATCH, **values}
    pairs = tuple(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()
    )
    return Request(config=str(file), plugins=("moe", "ep", *plugins), set=pairs)


def alone(layout: Request) -> Request:
    """The same on one process."""
    kept = tuple(pair for pair in layout.set if not pair.startswith("parallel."))
    return dataclasses.replace(layout, set=kept)


def p(**axes: int) -> dict[str, int]:
    return {f"parallel.{axis}": size for axis, size in axes.items()}


HALVES = {"train.micro_batch": 4}
TRACED = {"compile.backend": "aot_eager"}
LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "ep2": (2, (), p(ep=2)),
    "tp2 ep2, dp 1": (2, ("tp",), {**p(tp=2, ep=2), **HALVES}),
    "tp2, all experts on each rank": (2, ("tp",), {**p(tp=2), **HALVES}),
    "etp2": (2, ("tp",), {**p(tp=2, etp=2), **HALVES}),
    "ep2, compiled": (2, ("compile",), {**p(ep=2), **TRACED}),  # test_compositions.py tries inductor
    "ep2, compiled, one layer": (2, ("compile",), {**p(ep=2), **TRACED, "decoder.layers": 1}),
    "ep2, recompute, traced": (2, ("ac", "compile"), {**p(ep=2), **TRACED}),
    "tp2, selective recompute, traced": (2, ("tp", "ac", "compile"), {**p(tp=2), **TRACED, "ac.mode": "selective"}),
    "ep4, recompute, accumulation": (4, ("ac",), {**p(ep=4), "train.micro_batch": 1, "ac.mode": "full"}),
    "ep2×dp2": (4, (), {**p(ep=2), "fsdp2.reshard": "never"}),
    "ep2×replicas2": (4, ("ac",), {**p(ep=2, dp_replicate=2), "ac.mode": "selective"}),
    "ep2×tp2": (4, ("tp",), p(ep=2, tp=2)),
    "ep2×tp2, without sequence parallelism": (4, ("tp",), {**p(ep=2, tp=2), "tp.sequence_parallel": False}),
    "ep4 over tp2×dp2": (4, ("tp",), {**p(ep=4, tp=2), "train.micro_batch": 1}),
    "ep2×etp2": (4, ("tp",), p(ep=2, tp=2, etp=2)),
    "ep2×etp2, without sequence parallelism": (4, ("tp",), {**p(ep=2, tp=2, etp=2), "tp.sequence_parallel": False}),
    "ep2, zero1": (2, ("zero1",), p(ep=2)),
    "ep2×dp2, zero1, recompute": (4, ("zero1", "ac"), {**p(ep=2), "ac.mode": "full"}),
    "ep2×replicas2, zero1, three experts for two ranks": (4, ("zero1",), {**p(ep=2, dp_replicate=2), "moe.experts": 6}),
    "ep2×tp2×dp2": (8, ("tp",), {**p(ep=2, tp=2), "train.micro_batch": 1}),
}
"""Those of one number of ranks together: they share a process group."""
EXTENDED = (
    *(
        "ep2",
        "tp2, all experts on each rank",
        "ep2, compiled",
        "ep2, recompute, traced",
        "tp2, selective recompute, traced",
    ),
    *("ep4, recompute, accumulation", "ep2×dp2", "ep2×tp2", "ep2×tp2, without sequence parallelism"),
    *("ep4 over tp2×dp2", "ep2×etp2", "ep2×etp2, without sequence parallelism", "ep2×dp2, zero1, recompute"),
    *("ep2×replicas2, zero1, three experts for two ranks", "ep2×tp2×dp2"),
)
"""CI has pairs of these, here, in variants below, or in test_compositions.py."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts without tokens": (
        "ep4, recompute, accumulation",
        {"moe.experts": 32, "moe.top_k": 1, "moe.normalise": False},
    ),
    "a capacity, each micro-batch balanced": ("ep2×tp2", {"moe.capacity": 1.0, "moe.balance_over": "batch"}),
    "DeepSeek's router": (
        "ep2×etp2, without sequence parallelism",
        {"moe.router": "sigmoid", "moe.groups": 4, "moe.top_groups": 2},
    ),
    "experts choose": ("ep2", {"moe.router": "expert_choice", "moe.balance": 0, "moe.bias_speed": 0}),
    "a narrow payload": ("ep2", {"alltoall.payload": "fp8"}),
}


def judge(verify: Verifier, file: Path, name: str, more: dict[str, Any]) -> Any:
    world, plugins, values = LAYOUTS[name]
    asked = request(file, *plugins, **{**values, **more})
    return verify(asked, world, steps=STEPS, reference=alone(asked))


@pytest.mark.parametrize("name", marked(LAYOUTS, EXTENDED))
def test_a_layout_equals_one_process(verify: Verifier, composition_file: Path, name: str) -> None:
    verdict = judge(verify, composition_file, name, {})
    assert verdict.agree, verdict
    assert {"routing", "buffers"} <= {check.name for check in verdict.checks}


@pytest.mark.parametrize("variant", VARIANTS)
def test_so_does_every_way_of_routing(verify: Verifier, composition_file: Path, variant: str) -> None:
    name, more = VARIANTS[variant]
    verdict = judge(verify, composition_file, name, more)
    assert verdict.agree, verdict


@pytest.mark.parametrize(
    ("name", "mask"),
    few(
        [("ep2×tp2", "mask_all"), ("etp2", "mask"), ("etp2", "mask_all"), ("ep2", "mask")],
        [("etp2", "mask_all"), ("ep2", "mask")],
    ),
)
def test_losses_of_the_router_do_not_depend_on_masked_labels(
    verify: Verifier, composition_file: Path, name: str, mask: str
) -> None:
    """Where all labels are masked, all gradients are the router's losses'."""
    world, plugins, values = LAYOUTS[name]
    more = {"moe.balance": 1.0, f"probe.{mask}": True, "probe.count": False}
    asked = request(composition_file, *plugins, "cases:Probe", **{**values, **more})
    verdict = verify(asked, world, steps=2, reference=alone(asked))
    assert verdict.agree, verdict


@pytest.mark.parametrize(
    ("plugins", "values", "message"),
    [
        (("ddp",), p(ep=2), "ddp can't take experts that are spread over ep ranks; use fsdp2 or zero1"),
        ((), p(ep=3), "must divide"),
    ],
)
def test_what_can_not_be_is_refused(
    verify: Verifier, composition_file: Path, plugins: tuple[str, ...], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        verify(request(composition_file, *plugins, **values), 2, steps=1)


def test_a_tie_is_reported_and_not_compared(verify: Verifier, composition_file: Path) -> None:
    verdict = verify(sabotaged(composition_file, "Tied", "moe"), 2, steps=3)
    assert verdict.undecided, verdict
    assert not verdict.agree
    routing_difference = verdict.routing_difference
    assert routing_difference is not None
    assert (routing_difference.step, routing_difference.where) == (1, "experts of layers.0.feed_forward.routed.router")
    assert 0 < routing_difference.moved <= routing_difference.near
    assert f"{routing_difference.moved} choices of {routing_difference.where} fell otherwise: ties" in verdict.advice[0]
    names = {check.name for check in verdict.checks}
    assert not names & {"loss", "grad_norm", "gradients", "buffers"}
    assert {"initial weights", "data", "routing", "replicas", "checkpoint"} <= names


def test_wrong_routing_is_named_before_what_comes_of_it(verify: Verifier, composition_file: Path) -> None:
    verdict = verify(sabotaged(composition_file, "Shifted", "moe"), 2, steps=3)
    assert {"routing", "gradients"} <= verdict.failed
    assert len(verdict.advice) == 1
    said = r"At step 1, \d+ choices of experts of layers\.1\..*router fell otherwise, and at most \d+ of them"
    assert re.match(said, verdict.advice[0]), verdict.advice


def test_experts_that_a_save_would_miss_are_refused(verify: Verifier, composition_file: Path) -> None:
    with pytest.raises(ForgeError, match=r"'ep' changed the shape of parameters; cut: layers\.0\..*experts\.down, "):
        verify(sabotaged(composition_file, "Plain", "ep"), 2, steps=3)


def sabotaged(file: Path, name: str, right: str) -> Request:
    """A request in which the plugin `right` is replaced by one that does something wrong."""
    asked = request(file, **{"moe.balance": 0, "moe.z_loss": 0, **p(ep=2)})
    plugins = tuple(f"expert_sabotage:{name}" if plugin == right else plugin for plugin in asked.plugins)
    pairs = tuple(re.sub(rf"^{right}\.", f"{name.lower()}.", pair) for pair in asked.set)
    return dataclasses.replace(asked, plugins=plugins, set=pairs)


def test_experts_need_a_model_that_has_them(verify: Verifier, composition_file: Path) -> None:
    asked = Request(config=str(composition_file), plugins=("ep",), set=("parallel.ep=2", "train.global_batch=8"))
    with pytest.raises(ConfigError, match="no experts to spread; enable a plugin that builds them, such as moe"):
        verify(asked, 2, steps=1)


@pytest.mark.parametrize(("payload", "share"), [("same", 1.0), ("fp8", 0.55)])
def test_no_more_is_sent_than_there_are_tokens(composition_file: Path, payload: str, share: float) -> None:
    """In bf16, where e4m3 is half: each of a layer's rows goes to its expert and back, and so does its gradient."""
    settings = {"alltoall.payload": payload, "decoder.dim": 128, "train.precision": "bf16", **p(ep=2)}
    planned = plan(resolve(request(composition_file, **settings), world=2), world=2)
    sent = sum(one.bytes for one in planned.communication if one.kind == "all_to_all")
    layers, tokens, top_k, dim, apart = 2, 4 * 16, 2, 128, 1 / 2
    rows = layers * tokens * top_k * dim * apart * torch.bfloat16.itemsize
    there = 2 * rows  # to experts, and gradients to them
    back = 2 * rows
    assert 0.5 * there + back <= sent <= 1.05 * (share * there + back)

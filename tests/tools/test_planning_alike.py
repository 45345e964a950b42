"""A plan from a few of many units that are alike is the plan from all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crossed import marked
from forge_train_tools import planning
from forge_train_tools.planning import Plan, alike
from forge_train_tools.planning.growth import Event, grown, rule
from forge_train_tools.testing.runs import prepared

pytestmark = [pytest.mark.slow, pytest.mark.unit, pytest.mark.timeout(300)]

QUICK = {"text.baseline": False, "run.device": "cpu", "train.evaluate_every": 0, "decoder.dim": 32}
CASES: dict[str, tuple[int, tuple[str, ...], Mapping[str, Any]]] = {
    "none": (1, (), {}),
    "fsdp2, tied": (8, ("fsdp2",), {"decoder.tied": True}),
    "fsdp2, micro-batches, ac": (2, ("fsdp2", "ac"), {"train.micro_batch": 1, "fsdp2.reshard": "step"}),
    "zero1, bf16": (4, ("zero1",), {"train.precision": "bf16"}),
    "fsdp2, tp": (4, ("fsdp2", "tp"), {"parallel.tp": 2}),
    "ac selective": (1, ("ac",), {"ac.mode": "selective"}),
    "ac of every second": (1, ("ac",), {"ac.every": 2, "decoder.layers": 12}),
    "moe, ep": (4, ("fsdp2", "moe", "ep"), {"parallel.ep": 2}),
    "moe, dense first": (1, ("moe",), {"moe.dense_first": 2, "decoder.layers": 9}),
}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    original, used = alike.rehearse_alike, []

    def make(world: int, plugins: tuple[str, ...], config: Mapping[str, Any], least: int) -> tuple[Plan, bool]:
        def shorter(*args: Any) -> Any:
            used.append(original(*args, least=least))
            return used[-1]

        launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        for name, value in {**launched, "MASTER_ADDR": "here", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(alike, "rehearse_alike", shorter)
        config = {**QUICK, "text.path": str(tmp_path / ".testing" / "text"), "decoder.layers": 7, **config}
        with prepared(plugins, config, without=(), preset="quickstart", folder=tmp_path) as setup:
            plan = planning.plan(setup, world=world, device="h100", folder=tmp_path / "none")
        return plan, used[-1] is not None

    return make


EXTENDED = (
    "none",
    "fsdp2, tied",
    "fsdp2, micro-batches, ac",
    "fsdp2, tp",
    "zero1, bf16",
    "ac selective",
    "moe, dense first",
)
"""CI has units of every kind, alike and in turns, on one rank and on several."""


@pytest.mark.parametrize("case", marked(CASES, EXTENDED))
def test_a_few_tell_what_all_would(planned: Any, case: str) -> None:
    world, plugins, config = CASES[case]
    few, shortened = planned(world, plugins, config, 6)
    every, whole = planned(world, plugins, config, 10**6)
    assert (shortened, whole) == (True, False)
    assert dataclasses.asdict(few) == dataclasses.asdict(every)


def test_plugins_that_do_not_say_so_are_rehearsed_whole(planned: Any) -> None:
    """Buckets of a fixed size: the first units all fit into one."""
    assert not planned(2, ("ddp",), {}, 6)[1]


def test_layers_between_layers_are_rehearsed_whole(planned: Any) -> None:
    """Where a layer is left out, the one before it would not run."""
    image = {"image.size": 32, "image.dim": 16, "image.heads": 2, "image.layers": 2}
    assert not planned(1, ("image", "cross_attention"), image, 6)[1]


class _Unit(nn.Module):
    def __init__(self, width: int = 4, **options: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width, bias=options.pop("bias", True), dtype=options.pop("dtype", torch.float32))
        self.options = options

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class _Other(_Unit):
    pass


def _hook(scale: float) -> Any:
    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return out * scale

    return hook


def _form(unit: nn.Module, name: str = "layers.0") -> Any:
    return {**dict(alike._attributes(name, unit)), **alike._composed(name, unit)}


def _hooked(scale: float) -> nn.Module:
    unit = _Unit()
    unit.register_forward_hook(_hook(scale))
    return unit


def _patched(scale: float) -> nn.Module:
    unit = _Unit()
    unit.forward = lambda x: x * scale  # type: ignore[method-assign]
    return unit


def _frozen() -> nn.Module:
    return _Unit().requires_grad_(False)


OTHERS: dict[str, nn.Module] = {
    "class": _Other(),
    "shape": _Unit(5),
    "a parameter less": _Unit(bias=False),
    "dtype": _Unit(dtype=torch.bfloat16),
    "frozen": _frozen(),
    "options": _Unit(window=128),
    "a hook": _hooked(1.0),
    "a patched forward": _patched(1.0),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_units_that_differ_are_not_alike(other: nn.Module) -> None:
    assert _form(other) != _form(_Unit())


def test_units_of_different_closures_are_not_alike() -> None:
    assert _form(_Unit(name="layers.0")) == _form(_Unit(name="layers.1"), "layers.1")
    for make in (_hooked, _patched):
        assert _form(make(2.0)) == _form(make(2.0)) != _form(make(3.0))


def test_patterns() -> None:
    assert alike.pattern("abbbbc") == alike.Pattern(1, 1, 4)
    assert alike.pattern("xababab") == alike.Pattern(1, 2, 3)
    assert alike.pattern("abc") is None


def _log(*events: tuple[str, float]) -> list[Event]:
    return [Event(kind, (number,)) for kind, number in events]


def test_logs_grow_by_events_and_by_numbers() -> None:
    logs = [_log(("in", 1), *[("unit", 4)] * units, ("sum", 4 * units)) for units in (3, 4, 5, 9)]
    found = rule(logs[:3])
    assert found is not None
    assert list(grown(found, 6)) == logs[3]


@pytest.mark.parametrize("numbers", [(1, 2, 4), (9, 16, 25)])
def test_what_does_not_grow_evenly_has_no_rule(numbers: tuple[int, ...]) -> None:
    assert rule([_log(("sum", number)) for number in numbers]) is None

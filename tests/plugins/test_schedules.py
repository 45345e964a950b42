"""Schedules against their closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fakes
import toys
from forge_train import Plugin
from forge_train.config import Config
from forge_train.config.sections import TrainSection
from forge_train_plugins.schedules.curves import (
    REX,
    WSD,
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    Piecewise,
    Polynomial,
)

pytestmark = [pytest.mark.unit]

PEAK = 2.0
WARM: list[type[Plugin]] = [Constant, Cosine, InverseSqrt, Linear, Polynomial, REX, WSD]


def run_of(steps: int = 10, **train: Any) -> Config:
    return Config(train=TrainSection(steps=steps, **train))


def scheduled(plugin: type[Plugin], config: Config, **values: Any) -> tuple[Any, torch.optim.Optimizer]:
    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    job = SimpleNamespace(config=config, steps=config.train.total_steps)
    return fakes.make(plugin, **values).lr_schedule(made, job), made


def learning_rates(plugin: type[Plugin], config: Config | None = None, **values: Any) -> list[float]:
    """Of each step of the run, and of two more."""
    config = config or run_of()
    found, (schedule, made) = [], scheduled(plugin, config, **values)
    for _ in range(config.train.total_steps + 2):
        found.append(made.param_groups[0]["lr"])
        made.step()
        schedule.step()
    return found


def decay(shape: Callable[[float], float], floor: float, steps: int) -> list[float]:
    """From the peak to the floor in so many steps, and two more at the floor."""
    return [PEAK * (floor + (1 - floor) * shape(min(t / steps, 1.0))) for t in range(steps + 2)]


@pytest.mark.parametrize(
    ("plugin", "values", "shape"),
    [
        (Cosine, {}, lambda t: math.cos(math.pi * t / 2) ** 2),
        (Linear, {}, lambda t: 1 - t),
        (Polynomial, {"power": 3.0}, lambda t: (1 - t) ** 3),
        (REX, {}, lambda t: (1 - t) / (0.5 + 0.5 * (1 - t))),
        (REX, {"beta": 0.9}, lambda t: (1 - t) / (1 - 0.9 * t)),
    ],
)
def test_rises_to_the_peak_and_falls_to_the_floor(plugin: Any, values: Any, shape: Any) -> None:
    found = learning_rates(plugin, warmup=3, floor=0.1, **values)
    assert found == pytest.approx([0.5, 1.0, 1.5, *decay(shape, 0.1, 7)])


def test_constant_stays() -> None:
    assert learning_rates(Constant, warmup=3) == pytest.approx([0.5, 1.0, 1.5] + [2.0] * 9)


def test_inverse_sqrt_is_the_papers_formula_and_knows_no_end() -> None:
    """The paper counts steps from 1, and its peak is at its warm-up step: min(s^-1/2, s w^-3/2), as a share of that."""
    peak = 4.0
    paper = [min(s**-0.5, s * peak**-1.5) * peak**0.5 * PEAK for s in range(1, 13)]
    assert learning_rates(InverseSqrt, warmup=3) == pytest.approx(paper)
    longer = learning_rates(InverseSqrt, run_of(20), warmup=3)
    assert longer[:12] == learning_rates(InverseSqrt, warmup=3)


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ("linear", lambda t: 1 - t),
        ("sqrt", lambda t: 1 - math.sqrt(t)),
        ("cosine", lambda t: math.cos(math.pi * t / 2) ** 2),
    ],
)
def test_wsd_stays_and_then_decays(shape: str, form: Any) -> None:
    found = learning_rates(WSD, warmup=2, decay=4, shape=shape, floor=0.05)
    assert found == pytest.approx([2 / 3, 4 / 3, *[2.0] * 4, *decay(form, 0.05, 4)])


def test_wsd_knows_no_length_before_its_decay() -> None:
    assert (
        learning_rates(WSD, run_of(10), warmup=2, decay=4)[:7] == learning_rates(WSD, run_of(40), warmup=2, decay=4)[:7]
    )


def test_piecewise_joins_its_phases() -> None:
    found = learning_rates(
        Piecewise, start=0.2, until=[2, 0.5, 9], to=[1.0, 1.0, 0.0], curve=["linear", "linear", "cosine"]
    )
    falling = [PEAK * math.cos(math.pi * t / 8) ** 2 for t in range(4)]
    assert found == pytest.approx([0.4, 1.2, 2.0, 2.0, 2.0, *falling, 0.0, 0.0, 0.0], abs=1e-12)


def test_piecewise_stays_at_its_last_share() -> None:
    assert learning_rates(Piecewise, until=[4], to=[0.5])[4:] == [1.0] * 8


@pytest.mark.parametrize("plugin", WARM)
def test_without_warm_up_the_first_step_is_at_the_peak(plugin: Any) -> None:
    found = learning_rates(plugin, run_of(4), warmup=0)
    assert found[0] == PEAK
    assert min(found[:4]) > 0, "no step of the run is wasted"


@pytest.mark.parametrize("plugin", WARM)
def test_lengths_in_tokens_and_shares_are_rounded_to_steps(plugin: Any) -> None:
    by_steps = learning_rates(plugin, run_of(10, global_batch=2, sequence=8), warmup=3)
    by_tokens = run_of(0, tokens=150, global_batch=2, sequence=8)  # 9.4 steps
    assert learning_rates(plugin, by_tokens, warmup=50, unit="tokens") == by_steps
    assert learning_rates(plugin, by_tokens, warmup=0.3) == by_steps


def test_phases_and_decays_in_tokens() -> None:
    config = run_of(10, global_batch=2, sequence=8)
    assert learning_rates(WSD, config, decay=64, unit="tokens") == learning_rates(WSD, config, decay=4)
    by_tokens = learning_rates(Piecewise, config, until=[32, 1], to=[1, 0], unit="tokens")
    assert by_tokens == learning_rates(Piecewise, config, until=[2, 10], to=[1, 0])


@pytest.mark.parametrize("plugin", [*WARM, Piecewise])
def test_a_resumed_schedule_goes_on(plugin: Any) -> None:
    whole = learning_rates(plugin)
    schedule, made = scheduled(plugin, run_of())
    for _ in range(5):
        made.step()
        schedule.step()
    again, other = scheduled(plugin, run_of())
    other.load_state_dict(made.state_dict())
    again.load_state_dict(schedule.state_dict())
    other.step()
    again.step()
    assert other.param_groups[0]["lr"] == whole[6]


def test_a_run_follows_the_schedule_over_accumulation_and_a_stop(tmp_path: Path) -> None:
    config = {"adamw.lr": 0.01, "wsd.warmup": 2, "wsd.decay": 0.5, "train.micro_batch": 1, "checkpoint.every": 2}
    through = toys.run(tmp_path, "wsd", steps=6, config=config, name="through")
    expected = [0.01 * share for share in (1 / 3, 2 / 3, 1, 1, 1 - math.sqrt(1 / 3), 1 - math.sqrt(2 / 3))]
    assert [line["lr"] for line in through.metrics] == pytest.approx(expected)
    toys.run(tmp_path, "wsd", steps=6, config=config, name="stopped", stop_at=3)
    resumed = toys.run(tmp_path, "wsd", steps=6, config=config, name="stopped")
    assert resumed.numbers == through.numbers


@pytest.mark.parametrize("plugin", [Cosine, WSD, Piecewise])
def test_a_run_that_is_made_longer_or_shorter_follows_its_new_curve_at_once(tmp_path: Path, plugin: Any) -> None:
    name = getattr(plugin, "name", "piecewise")
    config = {"adamw.lr": PEAK, "checkpoint.every": 2, "checkpoint.keep": 9, "log.every": 1}
    first = toys.run(tmp_path, name, steps=6, config=config, name="first")
    for steps in (12, 5):
        curve = learning_rates(plugin, run_of(steps))
        for step in (4, 6)[: 1 + (steps > 6)]:
            saved = str(first.run / f"checkpoints/step-{step:08}")
            again = toys.run(tmp_path, name, steps=steps, config=config, name=f"to{steps}-{step}", resume=saved)
            assert [line["lr"] for line in again.metrics] == pytest.approx(curve[step:steps])


def test_wsd_decays_from_any_checkpoint(tmp_path: Path) -> None:
    config = {"adamw.lr": 0.01, "wsd.decay": 2, "checkpoint.every": 2, "checkpoint.keep": 9}
    long = toys.run(tmp_path, "wsd", steps=8, config=config, name="long")
    short = toys.run(
        tmp_path, "wsd", steps=4, config=config, name="short", resume=str(long.run / "checkpoints/step-00000002")
    )
    assert short.numbers == toys.run(tmp_path, "wsd", steps=4, config=config, name="own").numbers[2:]


def test_every_group_keeps_its_ratio() -> None:
    made = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.1)])
    schedule = fakes.make(Linear, floor=0.0).lr_schedule(made, SimpleNamespace(config=run_of()))
    for _ in range(5):
        made.step()
        schedule.step()
    assert [group["lr"] for group in made.param_groups] == pytest.approx([0.5, 0.05])


@pytest.mark.parametrize(
    ("plugin", "values", "said"),
    [
        *((one, {"warmup": 9, "floor": 0.0}, "") for one in (Cosine, Linear)),
        *((one, {"warmup": 10}, "warmup: 10 steps leave none of the run's 10 steps to train at.") for one in WARM[:-1]),
        (Cosine, {"warmup": 50000, "unit": "tokens"}, "warmup: 50000 tokens leave none of the run's 10 steps"),
        (WSD, {"warmup": 6, "decay": 4}, ""),
        (
            WSD,
            {"warmup": 7, "decay": 4},
            "decay: a warm-up of 7 steps and a decay of 4 do not fit into the run's 10 steps.",
        ),
        (WSD, {"decay": 100, "unit": "tokens"}, "decay: 100 tokens are less than one step."),
        (Piecewise, {}, ""),
        (Piecewise, {"until": [], "to": []}, "until: there is no phase"),
        (Piecewise, {"until": [5, 1]}, ""),
        (Piecewise, {"until": [6, 4]}, "until: phase 2 ends at step 4, where it begins, or before (6)."),
        (Piecewise, {"until": [4, 4]}, "until: phase 2 ends at step 4, where it begins"),
        (Piecewise, {"until": [4, 11]}, "until: the last phase ends at step 11, after the run (10 steps)."),
        (Piecewise, {"until": [0.01, 1]}, ""),
        (Piecewise, {"until": [5, 0.4]}, "until: phase 2 ends at step 4, where it begins, or before (5)."),
        (Piecewise, {"until": [0.5, 0.5]}, "until: phase 2 ends at step 5, where it begins, or before (5)."),
        (Piecewise, {"start": 0.0, "to": [0.0, 0.0]}, "to: the learning rate is 0 throughout."),
        (Piecewise, {"to": [1.0]}, "to: expected one for each of the 2 phases, found 1."),
        (Piecewise, {"curve": ["sqrt"]}, "curve: expected one for each of the 2 phases, found 1."),
    ],
)
def test_what_does_not_fit_the_run_is_refused(plugin: Any, values: Any, said: str) -> None:
    made = fakes.make(plugin, **values)
    name = getattr(plugin, "name", "piecewise")
    problems = [f"{problem.key}: {problem.message}" for problem in made.check_config(run_of())]
    assert [one[: len(said) + len(name) + 1] for one in problems] == ([f"{name}.{said}"] if said else [])

"""State and parameters in bf16 on several ranks: as near to fp32 as on one process, and resumed to the bit."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import few
from forge_train import ConfigError
from forge_train_tools.testing import Pool, RunForge, Verifier
from test_matrix_optimizers import LAYOUTS, alone, resumed, same_bits, saved, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]
FP32 = {"adamw": {"adamw.lr": 0.01}, "lion": {"lion.lr": 0.003}, "schedule_free": {"schedule_free.lr": 0.01}}
NARROW: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "adamw, both moments": (("adamw",), {"adamw.state.first": "bf16", "adamw.state.second": "bf16"}),
    "lion": (("lion",), {"lion.state.first": "bf16"}),
    "schedule_free": (("schedule_free",), {"schedule_free.state.second": "bf16"}),
    "adamw, bf16 and masters": (("adamw", "bf16_parameters"), {"train.precision": "bf16"}),
    "adamw, bf16 throughout": (
        ("adamw", "bf16_parameters"),
        {"train.precision": "bf16", "adamw.state.masters": False, "adamw.state.first": "bf16"},
    ),
}


def distance(here: Mapping[str, Any], there: Mapping[str, Any]) -> float:
    """How far two ends are apart, over all parameters, relative to the distance travelled."""
    names = there["ended"]
    apart = sum(float((here["ended"][name].float() - names[name].float()).square().sum()) for name in names)
    return (apart / sum(float((names[n] - there["begun"][n]).square().sum()) for n in names)) ** 0.5  # type: ignore[no-any-return]


IN_CI = [
    *(("lion", "fsdp2 uneven"), ("schedule_free", "tp × dp")),
    *(("adamw, bf16 and masters", "fsdp2 uneven"), ("adamw, bf16 throughout", "hsdp")),
]
"""Every optimizer, dtype of moments and kind of layout."""


@pytest.mark.parametrize(
    ("kind", "layout"),
    few([*itertools.product(NARROW, ["fsdp2 uneven", "hsdp", "tp × dp", "ep × dp"])], IN_CI),
)
def test_it_is_as_near_to_fp32_as_on_one_process(
    ranks: Pool, tmp_path: Path, ends: Callable[..., dict[str, Any]], layout: str, kind: str
) -> None:
    """fp32 stands for the exact path: its own rounding is a thousandth of bf16's."""
    world, plugins, config = LAYOUTS[layout]
    extra, settings = NARROW[kind]
    many = ((*extra, *plugins), {**config, **FP32[extra[0]], **settings})
    exact = alone((extra[0], *plugins), {**config, **FP32[extra[0]]})
    train(ranks, tmp_path, world, *many)
    found = {"exact": ends(*exact), "one": ends(*alone(*many)), "many": saved(tmp_path)}
    assert found["one"]["state"].keys() == found["many"]["state"].keys()
    one, other = (distance(found[name], found["exact"]) for name in ("one", "many"))
    assert 0 < other <= 2 * one, (one, other)
    assert {str(tensor.dtype) for tensor in found["many"]["state"].values()} >= (
        {"torch.bfloat16"} if kind != "adamw, bf16 and masters" else {"torch.float32"}
    )


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["adamw, both moments", "adamw, bf16 and masters", "adamw, bf16 throughout"])
def test_resumed_it_repeats_to_the_bit_and_goes_on_elsewhere(ranks: Pool, tmp_path: Path, kind: str) -> None:
    world, plugins, config = LAYOUTS["fsdp2 uneven"]
    extra, settings = NARROW[kind]
    plugins, config = (*extra, *plugins), {**config, **FP32[extra[0]], **settings, "checkpoint.every": 1}
    here = {"steps": 6, "folder": tmp_path}
    resumed(ranks, world, plugins, config, name="whole", **here)
    resumed(ranks, world, plugins, config, name="stopped", stop_at=3, **here)
    shutil.copytree(tmp_path / "stopped", tmp_path / "moved")
    resumed(ranks, world, plugins, config, name="stopped", **here)
    assert same_bits(saved(tmp_path, "stopped"), saved(tmp_path, "whole"))
    resumed(ranks, 4, (*extra, "tp", "fsdp2"), {**config, "parallel.tp": 2}, name="moved", **here)
    moved, there = saved(tmp_path, "moved"), saved(tmp_path, "whole")
    assert {key: tensor.dtype for key, tensor in moved["state"].items()} == {
        key: tensor.dtype for key, tensor in there["state"].items()
    }
    begun = {name: weight.float() for name, weight in there["begun"].items()}
    ended = {name: weight.float() for name, weight in there["ended"].items()}
    assert distance(moved, {"begun": begun, "ended": ended}) <= 0.05, "of the distance: roundings of bf16"


def test_a_shard_is_rounded_as_the_whole_is(ranks: Pool) -> None:
    for reply in ranks.run("narrow_cases:rounded_alike", 4, timeout=100):
        assert reply == {"rows": True, "columns": True, "both": True, "uneven": True}


@pytest.mark.parametrize(("plugin", "agrees"), [("adamw", True), ("narrow_cases:StaleMasters", False)])
def test_verify_agrees_and_sees_masters_that_are_not_updated(
    verify: Verifier, composition_file: Path, plugin: str, agrees: bool
) -> None:
    own = "adamw" if agrees else "stale_masters"
    settings = {f"{own}.lr": 0.01, "cosine.warmup": 0, "train.precision": "bf16"}
    request = compositions._request(composition_file, (plugin, "bf16_parameters", "fsdp2"), settings)
    verdict = verify(request, 2, steps=3)
    print(verdict, verdict.advice)
    assert bool(verdict.failed) != agrees, verdict
    assert agrees or "optimizer" in verdict.failed, verdict


@pytest.mark.parametrize(
    ("plugins", "config", "says"),
    [
        (("lion",), {"lion.state.second": "bf16"}, r"lion\.state\.second: this optimizer has no second moment"),
        (("schedule_free",), {"schedule_free.state.first": "bf16"}, r"schedule_free\.state\.first: .* no first moment"),
        ((), {"adamw.state.masters": False}, r"adamw\.state\.masters: has no effect: all parameters are fp32"),
        (("bf16_parameters",), {}, r"train\.precision: is 'fp32'; bf16_parameters needs 'bf16'"),
        (
            ("bf16_parameters", "torch_optimizer"),
            {"train.precision": "bf16", "torch_optimizer.name": "torch.optim:Adagrad"},
            r"torch_optimizer would round its updates to bf16",
        ),
        (
            (),
            {"adamw.state.first": "8bit"},
            r"adamw\.state\.first: '8bit' rounds .* Set adamw\.state\.second to '8bit'",
        ),
        ((), {"adamw.state.second": "int8"}, r"adamw\.state\.second.*8bit"),
        (("schedule_free", "cosine"), {}, "'cosine'.* and .*'schedule_free'.* both fill the slot 'lr_schedule'"),
        (("schedule_free",), {"schedule_free.warmup": 3}, "schedule_free.warmup: 3 leave none of the run's 2 steps"),
        (("schedule_free",), {"schedule_free.betas": [0.0, 0.9]}, "schedule_free.betas.*greater than 0"),
    ],
)
def test_what_can_not_be_is_refused(
    run_forge: RunForge, plugins: tuple[str, ...], config: Mapping[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run_forge(plugins, config, steps=2)

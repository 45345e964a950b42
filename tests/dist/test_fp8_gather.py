"""`fp8.all_gather`: what is sent, what arrives, what stays as it is; test_low_precision.py judges its gradients."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compositions
import gather_cases
from forge_train.checkpoint import checkpoint
from forge_train_tools.testing import Pool, PoolError, run_forge

pytestmark = [pytest.mark.dist]

Settings = Mapping[str, Any]
ON = {"fp8.all_gather": True}


@pytest.fixture
def train(ranks: Pool, tmp_path: Path) -> Any:
    def train(world: int, plugins: tuple[str, ...], config: Settings, **more: Any) -> dict[str, Any]:
        arguments = {"folder": str(tmp_path), "plugins": plugins, "config": dict(config), "timeout": 200, **more}
        reply: dict[str, Any] = ranks.run("cases:train", world, **arguments)[0]
        return reply

    return train


def composed(run: str | Path) -> dict[str, Any]:
    report = json.loads((Path(run) / "composition.json").read_text())
    found: dict[str, Any] = next(one for one in report if one["slot"] == "fp8_gather")
    return found


LOW = [(48, 33), (50, 17), (5, 16 * 32)]
PLAIN = [(48, 1), (50, 1), (21, 24), (21, 1), (48, 20), (48, 1), (48, 1)]
"""Shapes of what is split along its first axis, `[first, rest]`: in float8, and as it is."""


@pytest.mark.parametrize(
    ("world", "precision", "replicas"), [(2, "bfloat16", 1), (3, "float16", 1), (3, "float32", 1), (4, "bfloat16", 2)]
)
def test_rows_arrive_rounded_and_all_else_as_it_was(ranks: Pool, world: int, precision: str, replicas: int) -> None:
    """Also where ranks hold different numbers of rows, or columns; a weight that another module shares is as it was."""
    shards = world // replicas
    values = [-(-first // shards) * rest for first, rest in LOW] + [50 * 48 // shards]
    rows = [-(-48 // shards), -(-50 // shards), -(-5 // shards) * 16, 50]
    plain = sum(-(-first // shards) * rest for first, rest in PLAIN)
    held = shards * (sum(values) + sum(rows) + plain * (4 if precision == "float32" else 2))
    assert sum(values) + sum(rows) <= 0.55 * 2 * sum(values)
    for reply in ranks.run(gather_cases.gathered, world, precision=precision, replicas=replicas):
        assert reply["found"] == ["even", "uneven", "across", "experts"]
        assert reply["wrong"] == []
        assert reply["sent"] == [["all_gather", shards, held]] * 2
        assert reply["plain"]


def test_a_run_sends_half_of_bf16_and_comes_to_the_same_losses(train: Any) -> None:
    config = {"train.precision": "bf16", "train.micro_batch": 6, "fsdp2.reshard": "never", "decoder.hidden": 64}
    off, on = (train(2, ("fp8", "fsdp2"), {**config, **more}) for more in ({}, ON))
    assert composed(on["run"])["note"] == "14 of 14 weights gathered in e4m3"
    alone = dict(run_forge([], {"decoder.hidden": 64}).model.named_parameters())
    bf16 = sum(alone[name].numel() for name in composed(on["run"])["matched"])  # half of two bytes each
    saved = off["sent"][-1]["all_gather"] - on["sent"][-1]["all_gather"]
    assert 0.45 * bf16 <= saved < 0.5 * bf16
    assert on["losses"] == pytest.approx(off["losses"], rel=1e-4)


@pytest.mark.parametrize(
    ("world", "plugins", "config"),
    [
        (2, ("fsdp2",), {}),
        (3, ("fsdp2", "ac"), {"fp8.recipe": "rowwise", "train.precision": "bf16"}),
        pytest.param(
            *(4, ("fsdp2", "tp"), {"fp8.recipe": "rowwise_gw_hp", "parallel.tp": 2, "decoder.kv_heads": 4}),
            marks=pytest.mark.extended,
        ),
    ],
)
def test_gradients_differ_by_a_tenth_of_what_float8_changes(
    ranks: Pool, tmp_path: Path, world: int, plugins: tuple[str, ...], config: Settings
) -> None:
    """On three ranks shards are uneven."""
    config = {"train.micro_batch": 12 // world if "tp" not in plugins else 6, **config}
    found = ranks.run(gather_cases.apart, world, folder=str(tmp_path), plugins=plugins, config=config)[0]
    print(f"{max(found.values()):.2g} of float8's own: {found}")
    assert max(found.values()) < 0.1


def test_a_checkpoint_is_the_same_and_goes_on_without_it(train: Any) -> None:
    config = {"train.micro_batch": 6}
    ends = {"steps": 4, "stop_at": 2}
    off = train(2, ("fp8", "fsdp2"), config, name="off", **ends)
    on = train(2, ("fp8", "fsdp2"), {**config, **ON}, name="on", **ends)
    saved = [checkpoint.found(Path(one["run"]) / "checkpoints")[0].path for one in (off, on)]
    assert checkpoint.shapes(saved[0]) == checkpoint.shapes(saved[1])
    changed = {**config, "checkpoint.allow_changes": ["fp8.all_gather"]}
    went_on = train(2, ("fp8", "fsdp2"), changed, name="on", steps=4)
    alone = train(1, ("fp8",), {**config, **ON, "train.micro_batch": 12}, name="off-on-one", steps=4)
    assert len(went_on["losses"]) == 4
    assert went_on["losses"] == pytest.approx(alone["losses"], rel=1e-4)


def test_a_resumed_run_is_the_one_that_went_through(train: Any) -> None:
    config = {"train.micro_batch": 6, "train.precision": "bf16", **ON}
    through = train(2, ("fp8", "fsdp2"), config, name="through", steps=4)
    train(2, ("fp8", "fsdp2"), config, name="cut", steps=4, stop_at=2)
    resumed = train(2, ("fp8", "fsdp2"), config, name="cut", steps=4)
    assert resumed["losses"] == through["losses"]
    assert resumed["weights"] == through["weights"]
    assert composed(resumed["run"])["note"] == "14 of 14 weights gathered in e4m3"


@pytest.mark.parametrize("on", [True, False])
def test_a_comparison_of_layouts_packs_what_a_run_packs(
    ranks: Pool, tmp_path: Path, composition_file: Path, on: bool
) -> None:
    settings = {"decoder.hidden": 64, "train.global_batch": 4, "train.micro_batch": 2, "fp8.all_gather": on}
    request = dataclasses.asdict(compositions._request(composition_file, ("fp8", "fsdp2"), settings))
    packs = ranks.run(gather_cases.verified, 2, request=request, folder=str(tmp_path), timeout=120)
    assert packs[0] == packs[1]
    assert packs[0] >= 2 * 2 * 2 if on else packs[0] == 0, "in each step each of two blocks, forward and backward"


def test_zero1_and_tied_heads_and_layers_that_were_declined(train: Any) -> None:
    tied = {**ON, "train.micro_batch": 6, "decoder.tied": True, "fp8.exclude": [], "decoder.vocabulary": 272}
    note = composed(train(2, ("fp8", "zero1"), tied)["run"])["note"]
    assert note == "14 of 15 weights gathered in e4m3"
    declined = composed(train(2, ("fp8", "fsdp2"), {**ON, "train.micro_batch": 6, "fp8.mode": "auto"})["run"])
    assert declined["note"] == "0 of 0 weights gathered in e4m3"


@pytest.mark.parametrize(
    ("plugins", "config"), [(("fp8", "ddp"), {}), (("fp8", "fsdp2"), {"parallel.dp_replicate": 2})]
)
def test_is_refused_where_no_weights_are_gathered(train: Any, plugins: tuple[str, ...], config: Settings) -> None:
    with pytest.raises(PoolError, match=r"ConfigError: fp8.all_gather: no weights are gathered on this layout\. Shard"):
        train(2, plugins, {**ON, **config, "train.micro_batch": 6})

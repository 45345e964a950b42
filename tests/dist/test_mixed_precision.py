"""bf16 and fp16 on one process and on several, and the dynamic loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import compositions
from crossed import few, marked
from forge_train import ConfigError, DivergedError, Plugin, StepResult, hookimpl
from forge_train.plugin import hookspecs
from forge_train_tools.testing import Pool, Verifier
from forge_train_tools.testing.runs import RunForge

pytestmark = [pytest.mark.dist]

STEP = {"train.micro_batch": 1, "train.global_batch": 6}


@pytest.fixture(scope="module")
def train(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def call(world: int, precision: str, config: Mapping[str, Any], plugins: tuple[str, ...] = ()) -> Any:
        folder = tmp_path_factory.mktemp("precision")
        config = {**STEP, "train.precision": precision, **config}
        replies = ranks.run("cases:train", world, folder=str(folder), plugins=plugins, config=config)
        return replies[0]

    return call


def test_the_precision_plugin_steps_aside_for_what_gathers_narrow_weights(train: Any) -> None:
    assert "precision" in train(2, "bf16", {})["idle"]
    assert "precision" not in train(2, "bf16", {}, ("ddp",))["idle"]
    assert "precision" not in train(2, "fp32", {})["plugins"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_process_keeps_fp32_weights_and_names(run_forge: RunForge, precision: str) -> None:
    wide, narrow = (run_forge(config={"train.precision": name}) for name in ("fp32", precision))
    before, after = (dict(run.model.named_parameters()) for run in (wide, narrow))
    assert list(before) == list(after)
    assert {parameter.dtype for parameter in after.values()} == {torch.float32}
    assert narrow.losses == pytest.approx(wide.losses, rel=1e-2)
    assert narrow.losses != wide.losses
    hidden = narrow.model(torch.zeros(1, 4, dtype=torch.int64))
    assert hidden.dtype is (torch.bfloat16 if precision == "bf16" else torch.float16)
    assert narrow.model.parts[0].head.weight.dtype is hidden.dtype
    assert type(narrow.model.parts[0].head).__name__ == "LMHead"


class Skips(Plugin):
    """Notes which steps are skipped, and with what scale each was taken."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.skipped: list[bool] = []

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self.skipped.append(step.skipped)


def test_an_overflow_skips_the_step_and_halves_the_scale(run_forge: RunForge) -> None:
    config = {"train.precision": "fp16", "loss_scaler": {"initial": 2.0**40, "growth": 2}}
    run = run_forge([Skips], config, steps=40)
    skipped = run.plugin("skips").skipped
    assert skipped[0]
    factor, good = 2.0**40, 0
    for bad in skipped:
        factor, good = (factor / 2, 0) if bad else (factor, good + 1)
        if good == 2:
            factor, good = factor * 2, 0
    scaler = hookspecs.loss_scale(run.job)
    assert scaler.state_dict() == {"factor": factor, "good": good}
    assert 1 < skipped.count(True) < 30
    assert all(torch.isfinite(parameter).all() for parameter in run.model.parameters())


def test_the_scale_is_part_of_the_state(run_forge: RunForge, tmp_path: Path) -> None:
    config = {"train.precision": "fp16", "loss_scaler": {"initial": 2.0**30, "growth": 3}}
    whole = run_forge(config=config, steps=24, folder=tmp_path / "whole", name="run")
    run_forge(config=config, steps=24, folder=tmp_path / "resumed", name="run", stop_at=13)
    resumed = run_forge(config=config, steps=24, folder=tmp_path / "resumed", name="run")
    assert resumed.numbers == whole.numbers
    first, second = (hookspecs.loss_scale(run.job).state_dict() for run in (whole, resumed))
    assert first == second


def test_gradients_that_overflow_at_any_scale_end_the_run(run_forge: RunForge) -> None:
    config = {"train.precision": "fp16", "loss_scaler.initial": 1.0, "decoder.std": 1000.0}
    with pytest.raises(DivergedError, match="overflow fp16 at a loss scale of 1"):
        run_forge(config=config)


def test_a_scaler_without_fp16_is_refused(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match="needs no loss scale"):
        run_forge(["loss_scaler"], {"train.precision": "bf16"})


def test_a_narrow_precision_without_its_plugin_is_refused(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match="no enabled plugin covers 'precision'"):
        run_forge(config={"train.precision": "bf16"}, without=["precision"])


# -- rules by module --------------------------------------------------------------------------------------------------

RULES = {
    "train.precision": "bf16",
    "decoder.qk_norm": True,
    "precision.rules": [{"match": "*norm"}, {"match": "layers.0.feed_forward"}, {"match": "head"}],
}
LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "fsdp2 ×3": (3, (), {}),
    "zero1 ×2": (2, ("zero1",), {}),
    "ddp ×2": (2, ("ddp",), {}),
    "tp2": (2, ("tp",), {"parallel.tp": 2, "parallel.dp_shard": 1}),
    "tp2 × fsdp2": (4, ("tp",), {"parallel.tp": 2, "parallel.dp_shard": 2}),
    "recomputed and compiled": (2, ("ac", "compile"), {"compile.backend": "aot_eager"}),
    "experts": (2, ("moe", "ep"), {"parallel.ep": 2, "parallel.dp_shard": 2}),
}


@pytest.mark.parametrize("layout", marked(LAYOUTS, ["tp2", "ddp ×2"]))
def test_rules_count_under_every_sharding(ranks: Pool, tmp_path: Path, layout: str) -> None:
    """Every module computes in its rule's dtype, and the gradients are those of one process to what bf16 leaves."""
    world, plugins, config = LAYOUTS[layout]
    experts = tuple(name for name in plugins if name == "moe")
    arguments = {"config": {**STEP, **RULES, **config}, "folder": str(tmp_path / "many")}
    many = ranks.run("precision_cases:dtypes", world, plugins=plugins, **arguments)
    alone = {"config": {**STEP, **RULES}, "folder": str(tmp_path / "one")}
    one = ranks.run("precision_cases:dtypes", 1, plugins=experts, **alone)[0]
    narrow = {"config": {**STEP, "train.precision": "bf16", "decoder.qk_norm": True}, "folder": str(tmp_path / "bf16")}
    plain = ranks.run("precision_cases:dtypes", 1, plugins=experts, **narrow)[0]
    for reply in many:
        assert reply["dtypes"] == one["dtypes"]
        assert reply["norm"] == pytest.approx(one["norm"], rel=2e-2)
    wide = {name for name, dtype in one["dtypes"].items() if dtype == "torch.float32"}
    assert {"norm", "head", "layers.0.feed_forward", "layers.1.attention.q_norm"} <= wide
    assert "layers.1.feed_forward" not in wide
    assert set(plain["dtypes"].values()) == {"torch.bfloat16"}


def test_fsdp2_refuses_a_rule_for_one_of_two_that_share_a_weight(train: Any) -> None:
    rule = {"precision.rules": [{"match": "head"}], "decoder.tied": True}
    with pytest.raises(Exception, match="'head' computes in float32 and shares a weight with another module"):
        train(2, "bf16", rule)


@pytest.mark.parametrize(("world", "plugins"), few([(2, ("ddp",)), (3, ("fsdp2",))], [(2, ("ddp",))]))
def test_a_growing_loss_scale_overflows_where_that_of_one_process_does(
    verify: Verifier, composition_file: Path, world: int, plugins: tuple[str, ...]
) -> None:
    """The backward pass gets the same scaled loss on any number of ranks."""
    settings = {"train.precision": "fp16", "loss_scaler.initial": 2.0**18, "loss_scaler.growth": 1}
    request = compositions._request(composition_file, plugins, settings)
    verdict = verify(request, world, steps=4)
    assert verdict.agree, verdict

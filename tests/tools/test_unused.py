"""A default that built nothing is not shown as active, and what the user set for it is an error."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import toys
from forge_train import ConfigError, Plugin, hookimpl, section
from forge_train.registry.declared import Specs
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import Layer
from forge_train_kit.model import Linear
from forge_train_tools.planning import plan
from forge_train_tools.testing import RunForge, installed
from forge_train_tools.testing.runs import prepared

pytestmark = [pytest.mark.unit]


class Squared(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.up, self.down = Linear(layer.dim, layer.ffn_dim), Linear(layer.ffn_dim, layer.dim)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).relu().square())


class Mine(Plugin):
    """Builds the feed-forward block of every layer, or of every second one."""

    @section
    class Config:
        half: bool = False

    @hookimpl
    def feed_forward(self, layer: Layer, job: Any) -> Any:
        return None if self.config.half and layer.index % 2 else Squared(layer)


class Still(nn.Module):
    def forward(self, x: Any, *, position_ids: Any = None, document_ids: Any = None, cache: Any = None) -> Any:
        return x


class NoKernel(Plugin):
    """Mixes no tokens, and asks for no kernel."""

    @hookimpl
    def attention(self, layer: Layer, job: Any) -> Any:
        return Still()


class Never(Plugin):
    """Builds no layer."""

    @hookimpl
    def feed_forward(self, layer: Layer, job: Any) -> Any:
        return None


class Kernel(Plugin):
    kernel_capabilities = KernelCapabilities(documents=True)

    @hookimpl
    def attention_kernel(self, job: Any) -> Any:
        return lambda query, key, value, *, document_ids=None, scale=None: query


class OwnTask(Plugin):
    """Asks for no loss."""

    @hookimpl
    def task(self, job: Any) -> Any:
        return toys.ToyTask()


def refused(says: str) -> Any:
    return pytest.raises(ConfigError, match=re.escape(says))


BUILT = "has no effect: feed_forward of every layer is built by 'mine'. Remove it."


def test_an_option_of_a_default_that_built_nothing(run_forge: RunForge, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_forge([Mine], sets=["swiglu.activation=gelu"], folder=tmp_path)
    assert str(caught.value) == f"--set swiglu.activation=gelu: swiglu.activation: {BUILT}"
    assert not [path for path in tmp_path.iterdir() if (path / "config.toml").exists()]
    with pytest.raises(ConfigError, match=r"tiny\.toml:\d+: swiglu\.activation: has no effect"):
        run_forge([Mine], {"swiglu.activation": "gelu"})
    with (
        prepared([Mine], {"swiglu.activation": "gelu"}, folder=tmp_path) as setup,
        refused("swiglu.activation: has no"),
    ):
        plan(setup)


def test_it_has_effect_where_the_default_builds_one_layer(run_forge: RunForge) -> None:
    run = run_forge([Mine], {"mine.half": True, "swiglu.activation": "gelu"}, steps=1)
    assert run.job.hooks.acting("feed_forward") == ["mine", "swiglu"]


def test_a_complete_file_sets_every_key_and_is_no_mistake(run_forge: RunForge, tmp_path: Path) -> None:
    """`forge config init` writes defaults; a run's own file has what a preset said."""
    run_forge([Mine], {"swiglu.activation": "swiglu"}, steps=1)
    first = run_forge([Mine], steps=1, folder=tmp_path, name="a")
    written = first.run / "config.toml"
    assert "[swiglu]" in written.read_text(encoding="utf-8")
    written.write_text(written.read_text(encoding="utf-8").replace('activation = "swiglu"', 'activation = "gelu"'))
    with installed([Mine]):
        from forge_train_tools.configuration.request import Request
        from forge_train_tools.configuration.setup import resolve

        assert plan(resolve(Request(config=str(written)))).slots["feed_forward"] == ("mine",)


@pytest.mark.slow
def test_what_built_nothing_is_not_shown(run_forge: RunForge, tmp_path: Path, capsys: Any) -> None:
    run = run_forge(["console", Mine, NoKernel, OwnTask], steps=1)
    started = next(event for event in run.events if event["event"] == "run_started")
    shown = capsys.readouterr().out
    for name in ("swiglu", "gqa", "sdpa", "cross_entropy"):
        assert name in run.job.hooks.enabled
        assert name not in started["plugins"]
        assert name not in shown
        assert name not in json.dumps((run.run / "composition.json").read_text(encoding="utf-8"))
    assert "mine" in shown
    assert "no_kernel" in shown
    with prepared([Mine, NoKernel], folder=tmp_path) as setup:
        slots = plan(setup).slots
    assert slots["attention"] == ("no_kernel",)
    assert "attention_kernel" not in slots


def test_a_loss_that_the_task_does_not_ask_for(run_forge: RunForge, tmp_path: Path) -> None:
    says, sets = "cross_entropy.z_loss: has no effect: nothing in this run asks for loss.", ["cross_entropy.z_loss=0.1"]
    with refused(says):
        run_forge([OwnTask], sets=sets)
    with prepared([OwnTask], sets=sets, folder=tmp_path) as setup, refused(says):
        plan(setup)


def test_a_plugin_that_was_asked_for_and_builds_no_layer(run_forge: RunForge) -> None:
    with pytest.raises(
        ConfigError, match=r"Plugin 'never' .* has nothing to do: feed_forward of every layer is built by"
    ):
        run_forge([Never])
    with pytest.raises(ConfigError, match=r"Plugin 'swiglu' .* has nothing to do: .* built by 'mine'\. Leave it out\."):
        run_forge([Mine, "swiglu"])
    watching = type("Watching", (Never,), {"on_step": hookimpl(lambda self: None)})
    assert run_forge([watching], steps=1).finished.outcome == "done"


def test_a_model_that_asks_for_no_layer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mine' .* has nothing to do: nothing in this run asks for feed_forward"):
        toys.run(tmp_path, Mine)
    assert toys.run(tmp_path, without=["gqa"]).job.hooks.unused == {"lm_head", "swiglu", "sdpa"}


def test_a_kernel_that_nobody_asks_for_is_told(run_forge: RunForge, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_forge([Kernel, NoKernel], steps=1)
    text = "Plugin 'kernel' has nothing to do: nothing in this run asks for attention_kernel."
    assert [record.getMessage() for record in caplog.records].count(text) == 1


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_a_plugin_of_an_axis_that_nobody_set(run_forge: RunForge, caplog: pytest.LogCaptureFixture, axis: str) -> None:
    text = f"Plugin '{axis}' does nothing here: parallel.{axis} is 1; set it, as in -s parallel.{axis}=2."
    with caplog.at_level(logging.WARNING):
        asked = run_forge([axis], steps=1)
        assert [record.getMessage() for record in caplog.records].count(text) == 1
        caplog.clear()
        again = run_forge([axis], {f"parallel.{axis}": 1}, steps=1, name="set")
    assert not any("does nothing" in record.getMessage() for record in caplog.records)
    assert asked.losses == again.losses


def test_layers_of_a_default_are_not_built_in_vain(run_forge: RunForge) -> None:
    asked: list[int] = []

    class Counting(Plugin):
        @hookimpl
        def feed_forward(self, layer: Layer, job: Any) -> Any:
            asked.append(layer.index)
            return Squared(layer)

    run_forge(
        [Counting, type("Mine2", (Mine,), {})], {"defaults.feed_forward": "counting", "mine2.half": True}, steps=1
    )
    assert asked == [1]


def test_what_is_asked_for_by_a_stage() -> None:
    assert all(spec.asked or spec.starts_only for spec in Specs([]).values() if spec.kind == "chain")

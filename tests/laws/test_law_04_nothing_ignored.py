"""Law 4. Nothing is silently ignored: each of these is an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train import Applied, ConfigError, Phase, Plugin, PluginError, Transform, hookimpl
from forge_train.compose.compose import compose
from forge_train.mesh.axes import CONFIGURED
from forge_train.mesh.layout import Layout
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.testing import installed

pytestmark = [pytest.mark.unit]


@pytest.fixture(autouse=True)
def found() -> Iterator[None]:
    with installed([toys.ToyModel, toys.ToyData]):
        yield


def refused(folder: Path, text: str = "", **more: Any) -> str:
    file = folder / "my.toml"
    top = 'plugins = ["toy_model", "toy_data"]\nwithout = ["console", "tensorboard"]\n'
    file.write_text(top + text, encoding="utf-8")
    more["set"] = ("train.steps=1", *more.get("set", ()))
    with pytest.raises(ConfigError) as caught:
        resolve(Request(config=str(file), **more))
    return str(caught.value).replace(f"{file}", "my.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train]\nstep = 5\n", "my.toml:4: train.step: there is no such key. Did you mean 'steps'?"),
        ("[toy_model]\ndepth = 5\n", "my.toml:4: toy_model.depth: there is no such key. [toy_model] has layers, tied."),
        ("[toy_model.deep]\n", "my.toml:3: toy_model.deep: there is no such key."),
        ("[toy_model.deep]\nx = 1\n", "my.toml:4: toy_model.deep: there is no such key."),
        (
            "[lion]\nlr = 1.0\n",
            "my.toml:3: section [lion] belongs to a plugin that is not enabled: add --plugins lion.",
        ),
        ("[lion]\n", "my.toml:3: section [lion] belongs to a plugin that is not enabled"),
        ("[text]\n", "my.toml:3: section [text] has no effect, because 'toy_data' takes the place of 'text'"),
        ("[nonsense]\n", "my.toml:3: there is no section [nonsense]."),
        ("lion.lr = 1.0\n", "my.toml:3: section [lion] belongs to a plugin that is not enabled"),
        (
            "plugin = ['lion']\n",
            "my.toml:3: plugin: expected a section [plugin], found ['lion']. Did you mean 'plugins'?",
        ),
        ("[defaults]\noptimiser = 'lion'\n", "my.toml:4: defaults.optimiser: there is no such slot. Did you mean"),
        ("[defaults]\noptimizer = 'cosine'\n", "my.toml:4: defaults.optimizer: plugin 'cosine' does not fill the slot"),
    ],
)
def test_keys_sections_and_slots_that_nobody_reads(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"set": ("lion.lr=1",)}, "--set lion.lr=1: section [lion] belongs to a plugin that is not enabled"),
        ({"environment": "log.evry=1"}, "FORGE_SET: log.evry: there is no such key. Did you mean 'every'?"),
        ({"without": ("lion",)}, "--without: 'lion' would not be enabled anyway."),
        ({"set": ("train.steps=1\nlog.every=1",)}, "train.steps: expected an integer"),
        ({"set": ("run.device=cpu\nlog.every=1",)}, "run.device: expected 'auto' or 'cpu'"),
    ],
)
def test_options_that_nobody_reads(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    assert says in refused(tmp_path, **more)


def test_a_section_with_keys_of_its_base_only() -> None:
    class Base(toys.Bare):
        api = (1, 0)

    with installed([Base]), pytest.raises(ConfigError, match="base.anything: there is no such key"):
        resolve(Request(plugins=("base",), set=("train.steps=1", "base.anything=1")))


# -- the composition ------------------------------------------------------------------------------


def composing(folder: Path, phase: Phase, apply: Any, *, world: Layout | None = None, **more: Any) -> str:
    transform = Transform(phase, "mine", apply, **more)
    mine = type("Mine", (Plugin,), {"parallelize": hookimpl(lambda self, job: transform)})
    with toys.job(mine, folder=folder, world=world) as job, pytest.raises((ConfigError, PluginError)) as caught:
        compose(job, allocate=False)
    return str(caught.value)


def matching(part: Any) -> Applied:
    return Applied(part, ("head",))


def test_a_transform_that_matches_nothing(tmp_path: Path) -> None:
    message = composing(tmp_path, Phase.FLOAT8, Applied)
    assert "'mine' matched nothing in this model; leave mine out of --plugins, or mend its filter." in message


@pytest.mark.parametrize("axis", CONFIGURED)
def test_an_axis_that_nobody_covers(tmp_path: Path, axis: str) -> None:
    message = composing(tmp_path, Phase.SHARD, matching, world=Layout(**{axis: 2}), covers=("precision",))
    assert message.startswith(f"parallel.{axis} is 2, but no enabled plugin covers the axis {axis!r}.")


def test_a_transform_whose_phase_is_none() -> None:
    with pytest.raises(PluginError, match="expected a Phase, found 60"):
        Transform(60, "mine", matching)  # type: ignore[arg-type]


def test_a_checkpoint_of_another_configuration(tmp_path: Path) -> None:
    toys.run(tmp_path, name="a", steps=4, stop_at=2)
    with pytest.raises(ConfigError, match=r"run\.seed: 0 in the checkpoint, 1 now"):
        toys.run(tmp_path, name="a", steps=4, config={"run.seed": 1})
    with pytest.raises(ConfigError, match="can't be named 'b' too"):
        toys.run(tmp_path, name="b", steps=4, resume=str(tmp_path / "a"))

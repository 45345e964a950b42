"""Mistakes that authors and users make first: one message each, which names the plugin, the place and what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from forge_cli import forge, one_message
from forge_train import ConfigError, ForgeError, Plugin, PluginError, Transform, hookimpl, section
from forge_train.contract.events import Evaluation
from forge_train_tools.messages import explain

pytestmark = [pytest.mark.unit]


def told(folder: Path, kind: type[ForgeError], plugin: type[Plugin], **more: Any) -> str:
    with pytest.raises(kind) as caught:
        toys.run(folder, plugin, steps=1, **more)
    return str(caught.value)


def doing(hook: str, function: Any) -> type[Plugin]:
    """A plugin with one hook, and another one so that it is no observer."""
    members = {"on_step": hookimpl(lambda self: None), hook: hookimpl(function)}
    return type("Mine", (Plugin,), members)


def leave(self: Any) -> None:
    sys.exit(3)


def part_of(self: Any, model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for name, parameter in model.named_parameters() if "layers" not in name])


def stranger(self: Any, model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), torch.zeros(1, requires_grad=True)])


@pytest.mark.parametrize(
    ("hook", "function", "says"),
    [
        (
            "on_step",
            lambda self, step: step.add("x", "text"),
            "the metric 'mine.x' must be a number or a 0-dim tensor, f",
        ),
        ("on_step", lambda self, step: step.add("x", torch.zeros(3)), "found shape [3]."),
        (
            "on_log",
            lambda self, record: record.add("x", None) if isinstance(record, Evaluation) else None,
            "the metric 'mine.x' must be a number",
        ),
        ("on_step", leave, "exits (3). To end the run, use job.control.stop."),
        ("optimizer", part_of, "6 of 8 trainable parameters are in no group (layers.0.norm.weight, "),
        ("optimizer", stranger, "it holds parameters that are not the model's."),
        (
            "parallelize",
            lambda self, job: Transform("ADAPT", "x", lambda part: part),
            "expected a Phase, found 'ADAPT'.",
        ),  # type: ignore[arg-type, return-value]
    ],
)
def test_what_a_hook_does(tmp_path: Path, hook: str, function: Any, says: str) -> None:
    message = told(tmp_path, PluginError, doing(hook, function), config={"train.evaluate_every": 1})
    assert message.startswith(f"Plugin 'mine' (under-test 0), hook {hook} (")
    assert f"{Path(__file__).name}:{function.__code__.co_firstlineno})" in message
    assert says in message


def test_frozen_parameters_need_no_group(tmp_path: Path) -> None:
    def freezing(self: Any, model: Any) -> torch.optim.Optimizer:
        kept = [parameter.requires_grad_("layers" not in name) for name, parameter in model.named_parameters()]
        return torch.optim.SGD([parameter for parameter in kept if parameter.requires_grad])

    assert toys.run(tmp_path, doing("optimizer", freezing), steps=1).finished.outcome == "done"


def test_a_constructor_with_other_arguments(tmp_path: Path) -> None:
    class Mine(toys.Bare):
        def __init__(self) -> None: ...

    message = told(tmp_path, ConfigError, Mine)
    assert message.startswith("Plugin 'mine' (under-test 0): __init__ (")
    assert "must take `config` and nothing else: too many positional arguments." in message


class Mapped(toys.Bare):
    """An option that TOML can't hold."""

    @section
    class Config:
        device: torch.device = torch.device("cpu")


class Phased(toys.Bare):
    """The same, of a type that pydantic knows, deep inside another."""

    @section
    class Config:
        phases: tuple[dict[str, complex | None], ...] = ()


@pytest.mark.parametrize(("plugin", "option"), [(Mapped, "device: device"), (Phased, "phases: complex")])
def test_an_option_of_a_type_that_toml_lacks(tmp_path: Path, plugin: type[toys.Bare], option: str) -> None:
    message = told(tmp_path, ConfigError, plugin)
    assert f"under-test 0): its Config is not a section: class {plugin.__name__}.Config (" in message
    assert f"has an option of a type that no TOML value has ({option}); use int, " in message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "wsd"), "It is a plugin: use --plugins wsd."),
        (
            ("train", "{run}"),
            "train {run}/config.toml; to continue it, use --resume {run}. To start from its model, use --from {run}.",
        ),
        (
            ("train", "-p", "package.module"),
            "A class that is not installed is named package.module:Class, or by its file: ./file.py.",
        ),
        (
            ("train", "-p", "lion", "-s", "adamw.lr=1"),
            "section [adamw] has no effect, because 'lion' takes the place of 'adamw': leave it out.",
        ),
        (("train", "-p", "lion,adamw"), "both fill the slot 'optimizer'; leave adamw or lion out of --plugins."),
    ],
)
def test_on_the_command_line(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "config.toml").touch()
    message = one_message(forge(*(argument.format(run=tmp_path) for argument in arguments)), 2)
    assert says.format(run=tmp_path) in message


def test_the_place_of_a_failure_is_a_line_that_can_be_opened() -> None:
    """What generates code, as dataclasses do, has no file."""
    with pytest.raises(ZeroDivisionError) as caught:
        eval(compile("1 / 0", "<string>", "eval"))
    assert f"at {__file__}:" in explain(caught.value)

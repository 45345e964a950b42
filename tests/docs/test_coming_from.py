"""The page for users of other trainers: every option and command of ours in it exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge_train.base.names import canonical
from forge_train.config.sections import CheckpointSection, RunSection, TrainSection
from forge_train.registry.discovery import discover, load
from forge_train_cli.app import COMMANDS
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md").read_text(encoding="utf-8")
OURS = [line.split("|")[1].strip() for line in PAGE.splitlines() if re.match(r"\| [`a-z]", line)]
KEYS = sorted({key for cell in OURS for key in re.findall(r"`([a-z]+\.[a-z_]+)", cell)})
PLUGINS = sorted({name for cell in OURS for name in re.findall(r"-p ([a-z0-9_]+)", cell)})


def test_the_page_has_rows() -> None:
    assert len(OURS) > 35
    assert len(KEYS) > 25
    assert all(line.count("|") == 7 for line in PAGE.splitlines() if line.startswith("|"))


@pytest.mark.parametrize("key", KEYS)
def test_a_key_exists(key: str) -> None:
    section, name = key.split(".")
    own = {"train": TrainSection, "checkpoint": CheckpointSection, "run": RunSection}
    config = own.get(section) or load(next(one for one in discover() if canonical(one.name) == section)).Config
    assert name in config.__annotations__ or any(name in vars(one).get("__annotations__", {}) for one in config.__mro__)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_exists(plugin: str) -> None:
    assert plugin in {one.name for one in discover()}


def test_commands_exist() -> None:
    commands = {command for cell in OURS for command in re.findall(r"`forge ([a-z]+)", cell)}
    assert commands <= {*COMMANDS}
    assert commands


def test_the_defaults_are_as_told() -> None:
    config = resolve(Request(plugins=("lora",)), training=False).config.sections["lora"]
    assert (config.rank, config.alpha) == (16, 32.0)

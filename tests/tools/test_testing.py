"""The test kit itself: `run_forge`, and environments in which other plugins are installed than there are."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train import ConfigError, Job, LogRecord, Plugin, StepResult, hookimpl
from forge_train.registry import discovery
from forge_train.registry.discovery import discover
from forge_train_plugins.optimizers.lion import Lion
from forge_train_tools.testing import Installed, RunForge, installed, run_forge


class Noting(Plugin):
    """Notes the steps that were logged."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps: list[int] = []

    @hookimpl
    def on_log(self, record: LogRecord) -> None:
        self.steps.append(record.step)


def test_the_pytest_plugin_loads_nothing_slow() -> None:
    slow = ("torch", "numpy", "pydantic", "rich", "tomlkit", "forge_train_plugins")
    code = f"import sys, forge_train_tools.testing.fixtures; print([m for m in {slow} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_class_of_a_test_is_a_plugin(run_forge: RunForge) -> None:
    class Local(Noting):
        """Is defined where nothing can import it from."""

    run = run_forge([Local, "lion"], {"lion.lr": 1e-3}, steps=4)
    assert run.plugin("local").steps == [1, 2, 3, 4]
    assert run.job.hooks.provider("optimizer") == "lion"
    assert len(run.metrics) == len(run.losses) == 4
    assert {"run_started", "checkpoint_saved", "run_finished"} <= {event["event"] for event in run.events}
    assert "step_seconds" not in run.numbers[0]
    assert not [name for name in sys.modules if name.startswith("forge_train_local")]


def test_sections_and_dotted_keys_are_one_configuration(run_forge: RunForge) -> None:
    run = run_forge(["lion"], {"lion": {"lr": 2e-3}, "lion.betas": (0.5, 0.6)}, sets=["lion.weight_decay=0.25"])
    config = run.job.config.sections["lion"]
    assert (config.lr, config.betas, config.weight_decay) == (2e-3, (0.5, 0.6), 0.25)


def test_a_run_is_stopped_and_goes_on(run_forge: RunForge) -> None:
    whole = run_forge(steps=4)
    stopped = run_forge(steps=4, name="two", stop_at=2)
    assert (stopped.finished.outcome, stopped.finished.code, stopped.finished.step) == ("interrupted", 75, 2)
    assert run_forge(steps=4, name="two").numbers == whole.numbers
    with pytest.raises(ConfigError, match="had finished before"):
        run_forge(steps=4, name="two")


def test_mistakes_come_as_the_user_would_see_them(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match=r"tiny\.toml:\d+: lion.lr: expected a number"):
        run_forge(["lion"], {"lion.lr": "much"})
    with pytest.raises(ConfigError, match=r"there is no plugin named 'lyon'\. Did you mean 'lion'"):
        run_forge(["lyon"])


def test_the_process_is_left_as_it_was(run_forge: RunForge) -> None:
    torch.manual_seed(5)
    random.seed(5)
    before = (torch.get_rng_state(), random.getstate())
    run_forge(config={"run.deterministic": True})
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert not torch.are_deterministic_algorithms_enabled()


def test_without_a_folder_a_run_lies_in_a_temporary_one() -> None:
    run = run_forge(steps=1).run
    assert run.is_dir()
    assert not run.is_relative_to(Path.cwd())


def test_no_plugin_is_installed_until_it_is_added(forge_plugins: Installed) -> None:
    assert discover() == []
    assert forge_plugins.add(Noting, distribution="theirs", version="3") == "noting"
    (found,) = discover()
    assert found.label == "'noting' (theirs 3)"
    forge_plugins.restore("adamw")
    assert forge_plugins.names() == ["adamw", "noting"]
    with pytest.raises(LookupError, match="no_such_one"):
        forge_plugins.restore("no-such-one")


def test_a_class_that_is_installed_keeps_its_name(forge_plugins: Installed) -> None:
    assert forge_plugins.add(Lion) == "lion"
    (found,) = discover()
    assert found.distribution == "forge-train"
    assert forge_plugins.add(Lion, name="lion-two") == "lion_two"


def test_a_plugin_under_test_hides_the_installed_one_of_its_name() -> None:
    class Lion(Plugin):
        """Another one."""

        api = (1, 0)

        @hookimpl
        def on_start(self, job: Job) -> None: ...

        @hookimpl
        def on_step(self, step: StepResult) -> None: ...

    before = discover()
    with installed([Lion]):
        (found,) = [one for one in discover() if one.name == "lion"]
        assert discovery.load(found) is Lion
    assert discover() == before

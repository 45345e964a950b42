"""`forge doctor`: it finds what is wrong, and whether training could start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_command import Ended, Forge

Distribution = Callable[..., Path]

BROKEN = {"forge_train.plugins": {"ill": "ill_module:Ill"}}
NEEDY = '''
from forge_train import Plugin

class Needy(Plugin):
    """Needs something."""
    api = (1, 0)
    needs = {"nowhere_to_be_found": "pip install nowhere"}
'''


def texts(ended: Ended, status: str) -> list[str]:
    return [f"{check['name']}: {check['text']}" for check in ended.json["checks"] if check["status"] == status]


def test_a_machine_that_can_train(forge: Forge) -> None:
    found = forge("doctor", "--json")
    assert found.json["ok"]
    names = {check["name"] for check in found.json["checks"]}
    assert {"forge", "python", "command", "packages", "torch", "device", "all-reduce", "disk", "plugins"} <= names
    assert texts(found, "fail") == []
    assert "gloo works" in forge("doctor").out


def test_a_plugin_that_fails_to_import_is_named_and_others_work(forge: Forge, distribution: Distribution) -> None:
    distribution("ill-dist", {"ill_module": "import nothing_of_that_name"}, BROKEN)
    found = forge("doctor", "--json")
    assert found.json["ok"]
    assert any("'ill' (ill-dist 1.5) failed to import: ModuleNotFoundError" in text for text in texts(found, "warn"))
    forge("train", "tiny.toml", "-q")


def test_a_plugin_that_leaves_is_caught(forge: Forge, distribution: Distribution) -> None:
    distribution("ill-dist", {"ill_module": "raise SystemExit(4)"}, BROKEN)
    assert any("SystemExit: 4" in text for text in texts(forge("doctor", "--json"), "warn"))


def test_what_a_plugin_needs(forge: Forge, distribution: Distribution) -> None:
    distribution("needy-dist", {"needy_module": NEEDY}, {"forge_train.plugins": {"needy": "needy_module:Needy"}})
    assert any(
        "needs 'nowhere_to_be_found': pip install nowhere" in t for t in texts(forge("doctor", "--json"), "warn")
    )


def test_another_forge(forge: Forge, distribution: Distribution) -> None:
    distribution("other-forge", {}, {"console_scripts": {"forge": "other:main"}})
    assert any("other-forge installs a `forge` too" in text for text in texts(forge("doctor", "--json"), "warn"))


def test_a_hidden_command(forge: Forge, distribution: Distribution) -> None:
    distribution("their-commands", {}, {"forge_train.commands": {"train": "their:train"}})
    assert any("'train' of their-commands is hidden" in text for text in texts(forge("doctor", "--json"), "warn"))


@pytest.mark.parametrize("as_json", [False, True])
def test_a_folder_that_can_t_be_written(forge: Forge, as_json: bool) -> None:
    from forge_train_cli.app import run

    assert run(["doctor", "--run-dir", "/proc/nowhere", *(["--json"] if as_json else [])]) == 1


def test_a_preset_that_can_t_start(folder: Path, logger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_train.base.errors import ConfigError
    from forge_train_cli import checkup
    from forge_train_tools.configuration.request import Request

    def refuse(request: Request) -> None:
        raise ConfigError("no")

    monkeypatch.setattr("forge_train_tools.configuration.setup.resolve", refuse)
    (check,) = [one for one in checkup.checkup(Path("runs")) if one.name == "forge train"]
    assert (check.status, check.text) == ("fail", "no")


def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    from forge_train_cli import checkup

    wanted = ["torch>=2", "surely-not-there[x]>=1 ; python_version > '3'", "pytest ; extra == 'dev'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    checks = list(checkup._requirements())
    assert [(check.status, "surely-not-there" in check.text) for check in checks] == [("fail", True), ("ok", False)]

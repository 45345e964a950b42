"""`forge plugins check`: what it prints, and how it ends."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from forge_train import LogRecord, Plugin, hookimpl
from forge_train_cli import directory
from forge_train_cli.app import run
from forge_train_tools.testing import Installed


class Watching(Plugin):
    """Does nothing wrong."""

    api = (1, 0)

    @hookimpl
    def on_log(self, record: LogRecord) -> None: ...


class Forgetful(Plugin):
    """Leaves its decorator out."""

    api = (1, 0)

    def on_log(self, record: LogRecord) -> None: ...


@pytest.fixture
def plugins(forge_plugins: Installed) -> Installed:
    """Forge's own can be found, but are not among what is checked by default."""
    forge_plugins.add(Watching)
    return forge_plugins


@pytest.mark.slow
def test_one_plugin_is_shown_with_every_check(plugins: Installed, capsys: pytest.CaptureFixture[str]) -> None:
    plugins.restore()
    assert run(["plugins", "check", "watching"]) == 0
    shown = capsys.readouterr().out
    assert "✓ watching" in shown
    assert "✓ resumes exactly" in shown


def test_a_broken_plugin_is_marked_and_the_others_are_checked(
    forge_plugins: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    forge_plugins.add_broken("broken", "no_such_module:Thing", distribution="theirs", version="2")
    forge_plugins.add(Forgetful)
    assert run(["plugins", "check"]) == 1
    shown = capsys.readouterr().out
    assert "✗ broken  theirs 2" in shown
    assert "No module named 'no_such_module'" in shown
    assert "is named like a hook, but is not marked with @hookimpl" in shown
    assert "2 of 2 fail: broken, forgetful" in shown


@pytest.mark.slow
def test_json_is_one_object_with_every_check(plugins: Installed, capsys: pytest.CaptureFixture[str]) -> None:
    plugins.restore()
    plugins.add_broken("broken", "no_such_module:Thing")
    assert run(["plugins", "check", "watching", "broken", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert {one["name"]: one["passed"] for one in report["plugins"]} == {"watching": True, "broken": False}
    assert {check["status"] for check in report["plugins"][0]["checks"]} == {"ok", "skip"}


def test_a_name_used_twice_is_marked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_train.registry import discovery

    twice = [discovery.PluginRef("same", owner, "1", "no_such_module:Thing") for owner in ("ours", "theirs")]
    monkeypatch.setattr(discovery, "SOURCES", [lambda: twice])
    assert run(["plugins", "check"]) == 1
    assert "the name 'same' is used by ours 1 and theirs 1" in capsys.readouterr().out.lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["watchin"], "Did you mean 'watching'?"), (["-s", "a.b=1"], "name exactly one plugin"), (["nowhere:Thing"], "")],
)
def test_the_users_mistakes_end_with_2_or_a_failed_check(
    plugins: Installed, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plugins", "check", *arguments]) == (2 if message else 1)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_check_writes_a_report_and_a_badge(
    plugins: Installed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.add(Forgetful)
    file, badge = tmp_path / "forge-plugin.json", tmp_path / "forge-plugin.svg"
    assert run(["plugins", "check", "forgetful", "--report", str(file)]) == 1
    assert title(badge) == "Forge plugin API: 1.0 fails"
    (failed,) = directory.read_report(file)
    assert failed["checked"]["passed"] is False
    assert json.loads(file.read_text(encoding="utf-8"))["plugins"][0]["failed"]
    plugins.restore()
    capsys.readouterr()
    assert run(["plugins", "check", "watching", "--report", str(file), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["passed"] is True
    assert err == f"Wrote {file} and {badge}.\n"
    (one,) = directory.read_report(file)
    assert (one["name"], one["hooks"], one["role"]) == ("watching", ["on_log"], "observer")
    assert one["checked"]["passed"] is True
    assert title(badge) == "Forge plugin API: 1.0"


def title(file: Path) -> str:
    root = ET.parse(file).getroot()
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    (text,) = (node.text for node in root.iter("{http://www.w3.org/2000/svg}title"))
    assert text == ": ".join(map(str, texts))
    return str(text)


@pytest.mark.parametrize(("file", "says"), [("report.svg", "ends in .json"), ("nowhere/r.json", "there is no folder")])
def test_a_report_that_can_not_be_written_is_refused_first(
    file: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("forge_train_tools.testing.check", lambda *args, **more: pytest.fail("checked before"))
    assert run(["plugins", "check", "lion", "--report", file]) == 2
    assert says in capsys.readouterr().err

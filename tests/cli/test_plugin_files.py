"""`-p ./file.py`: a plugin that is one file, anywhere."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_command import Forge
from forge_train.base.names import split
from forge_train_kit.fingerprint import fingerprint
from forge_train_tools.testing.tiny import base_plugins

STEPS = """
from steps_helper import GREETING
from forge_train import Plugin, hookimpl, section

class {name}(Plugin):
    \"""Counts steps.\"""
    api = (1, 0)

    @section
    class Config:
        every: int = 1

    @hookimpl
    def on_step(self, step):
        if step.step % self.config.every == 0:
            with open("steps.txt", "a") as out:
                print(GREETING, step.step, file=out)
"""


@pytest.fixture(autouse=True)
def plugin(folder: Path) -> Iterator[Path]:
    """`mine/count.py` below the working directory, and a helper beside it."""
    (folder / "mine").mkdir()
    (folder / "mine" / "count.py").write_text(STEPS.format(name="Count"), encoding="utf-8")
    (folder / "mine" / "steps_helper.py").write_text("GREETING = 'step'\n", encoding="utf-8")
    before = list(sys.path)
    forget()
    yield folder / "mine" / "count.py"
    forget()
    sys.path[:] = before


def forget() -> None:
    """As in a new process."""
    fingerprint.cache_clear()
    for name in [name for name in sys.modules if name.startswith("forge_train_file_") or name == "steps_helper"]:
        del sys.modules[name]


def test_a_file_trains_and_resumes_from_another_folder(
    forge: Forge, folder: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge("train", "tiny.toml", "-p", "./mine/count.py", "-s", "count.every=2", "--name", "first", "-q")
    assert (folder / "steps.txt").read_text() == "step 2\nstep 4\nstep 6\n"
    run = folder / "runs" / "first"
    assert tomllib.loads((run / "config.toml").read_text())["plugins"] == [str(plugin), *base_plugins()]
    (entry,) = [one for one in json.loads((run / "plugins.json").read_text()) if one["name"] == "count"]
    assert entry["object"] == str(plugin)
    assert entry["hash"]
    # Of another size: compiled code is told by size and by mtime in seconds, and a run may take less.
    (plugin.parent / "steps_helper.py").write_text("GREETING = 'later'\n", encoding="utf-8")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "corpus.txt").write_bytes((folder / "corpus.txt").read_bytes())
    monkeypatch.chdir(elsewhere)
    forget()
    resumed = forge("train", "--resume", str(run), "-s", "train.steps=8", "-q")
    assert (elsewhere / "steps.txt").read_text() == "later 8\n"
    assert "Plugin 'count': code changed" in resumed.err


def test_a_file_in_a_configuration_starts_at_that_configuration(
    forge: Forge, folder: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'plugins = ["./count.py:Count"]\n[train]\nsteps = 1\n'
    (plugin.parent / "own.toml").write_text(text, encoding="utf-8")
    shown = forge("config", "show", "mine/own.toml").out
    assert f"{plugin}:Count" in shown


def test_the_file_is_described_and_has_a_role(forge: Forge, plugin: Path) -> None:
    found = forge("plugins", "info", "mine/count.py", "--json").json
    assert (found["name"], found["object"], found["role"]) == ("count", str(plugin), "observer")
    assert [one["key"] for one in found["options"]] == ["count.every"]


def test_a_class_of_a_file_with_several(forge: Forge, folder: Path) -> None:
    both = STEPS.format(name="MyFirst") + STEPS.format(name="Second")
    (folder / "mine" / "two.py").write_text(both, encoding="utf-8")
    assert forge("plugins", "info", "./mine/two.py:MyFirst", "--json").json["name"] == "my_first"
    said = forge("config", "show", "tiny.toml", "-p", "mine/two.py", fails=2).err
    assert "must define exactly one plugin class, found MyFirst, Second." in said
    assert f"Name the one you mean: {folder}/mine/two.py:MyFirst." in said


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("./absent.py", "--plugins: there is no file {folder}/absent.py."),
        ("./absent.py:Count", "--plugins: there is no file {folder}/absent.py."),
        ("mine/steps_helper.py", "must define exactly one plugin class, found none."),
        ("mine/count.py:Absent", "{folder}/mine/count.py has no 'Absent'."),
        ("mine/2nd.py", "rename it, or name the class: mine/2nd.py:Class."),
        ("mine/broken.py", "failed to import: ZeroDivisionError: division by zero ({folder}/mine/broken.py:1)."),
        ("mine/train.py", "would be named 'train', which is reserved."),
        ("mine/count.py,mine/count.py:Count", "are both 'count'."),
    ],
)
def test_files_that_are_no_plugin(forge: Forge, folder: Path, spec: str, says: str) -> None:
    for name, text in {"2nd": STEPS.format(name="Second"), "broken": "1 / 0\n", "train": ""}.items():
        (folder / "mine" / f"{name}.py").write_text(text, encoding="utf-8")
    assert says.format(folder=folder) in forge("config", "show", "tiny.toml", "-p", spec, fails=2).err


def test_an_installed_module_is_never_hidden(forge: Forge, folder: Path) -> None:
    (folder / "mine" / "json.py").write_text(STEPS.format(name="Json"), encoding="utf-8")
    assert forge("plugins", "info", "mine/json.py", "--json").json["name"] == "json"
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("a.b:C", ("a.b", "C")),
        ("lion", ("lion", "")),
        ("./x.py", ("./x.py", "")),
        ("/a:b/x.py:C", ("/a:b/x.py", "C")),
    ],
)
def test_what_a_plugin_is_named_by(spec: str, parts: tuple[str, str]) -> None:
    assert split(spec) == parts

"""A plugin whose code is not that of the checkpoint is named at resume, wherever in its files it changed."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import toys
from forge_train.base.names import PluginRef
from forge_train_kit.fingerprint import fingerprint, source_files
from tiny_models import reseal

pytestmark = [pytest.mark.unit]

FILES = {
    "changing/__init__.py": "",
    "changing/thin.py": """
from forge_train import Plugin, hookimpl

class Mine(Plugin):
    api = (1, 0)

    @hookimpl
    def on_gradients(self, update):
        from ._parts.inner import twice

        twice(1)
""",
    "changing/_parts/__init__.py": "from .deep import x\n",
    "changing/_parts/inner.py": """
import changing._parts.deep
from .. import _beside

def twice(x):
    return 2 * x
""",
    "changing/_parts/deep.py": "x = 1\n",
    "changing/_beside.py": "y = 1\n",
    "changing/another.py": "unrelated = 1\n",
    "changing/_broken.py": "def\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        file = tmp_path / "path" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "path")
    forget()
    yield tmp_path / "path"
    forget()


def forget() -> None:
    """As in a new process."""
    fingerprint.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "changing"]:
        del sys.modules[name]


def warnings(folder: Path, caplog: pytest.LogCaptureFixture, steps: int) -> list[str]:
    caplog.clear()
    forget()
    with caplog.at_level(logging.WARNING):
        toys.run(
            folder / "runs", "changing.thin:Mine", name="run", steps=4, config={"checkpoint.every": 1}, stop_at=steps
        )
    return [
        one.getMessage()
        for one in caplog.records
        if "code changed" in one.getMessage() or "now; the checkpoint" in one.getMessage()
    ]


def plugin(module: str) -> PluginRef:
    return PluginRef("mine", "", "", f"{module}:Mine")


@pytest.mark.parametrize("file", ["thin.py", "_parts/inner.py", "_parts/deep.py", "_beside.py"])
def test_a_change_in_any_of_its_files_is_told_once(
    package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    assert warnings(tmp_path, caplog, 1) == []
    then = fingerprint(plugin("changing.thin"))
    with (package / "changing" / file).open("a", encoding="utf-8") as out:
        out.write("# another thought\n")
    (told,) = warnings(tmp_path, caplog, 2)
    now = fingerprint(plugin("changing.thin"))
    assert told == (
        f"Plugin 'mine': code changed, same version (none): its files are {now[:8]} now, "
        f"and were {then[:8]} in the checkpoint."
    )
    assert warnings(tmp_path, caplog, 3) == []


def test_another_version_is_told_with_both(package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(tmp_path, caplog, 1) == []
    path = tmp_path / "runs" / "run" / "checkpoints" / "step-00000001"
    plugins = json.loads((path / "plugins.json").read_text(encoding="utf-8"))
    next(entry for entry in plugins if entry["name"] == "mine")["version"] = "9.9"
    (path / "plugins.json").write_text(json.dumps(plugins), encoding="utf-8")
    reseal(path)
    assert warnings(tmp_path, caplog, 2) == [
        "Plugin 'mine' is without a version now; the checkpoint was saved with 9.9."
    ]


def test_what_it_does_not_use_may_change(package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(tmp_path, caplog, 1) == []
    (package / "changing" / "another.py").write_text("unrelated = 2\n", encoding="utf-8")
    assert warnings(tmp_path, caplog, 2) == []


def test_a_lone_module_counts_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"lone_plugin": "import lone_help, json\n", "lone_help": "x = 1\n", "lone_other": ""}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    for name in ("lone_other", "lone_help", "lone_plugin"):
        seen.append(fingerprint(plugin("lone_plugin")))
        (tmp_path / f"{name}.py").write_text("import lone_help  # other\n", encoding="utf-8")
        fingerprint.cache_clear()
    seen.append(fingerprint(plugin("lone_plugin")))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3
    assert fingerprint(plugin("no_such_module")) == ""


def test_a_file_that_is_not_python_yet_is_counted_as_it_is(package: Path) -> None:
    assert fingerprint(plugin("changing._broken"))


def test_forge_s_own_plugins_count_what_computes() -> None:
    """A built-in plugin's thin file only names what lies beside it."""
    files = source_files(plugin("forge_train_plugins.optimizers.lion"))
    assert "forge_train_plugins.optimizers._lion" in files
    assert not {"forge_train_plugins.optimizers.adamw", "forge_train_plugins.data._text"} & set(files)

"""`forge plugins hooks`, and the page on how to declare a hook: its package is installed here as the page writes it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import toys
from forge_cli import forge
from forge_train.base.names import PluginRef
from forge_train.plugin.calls import implemented
from forge_train.registry.discovery import DISTRIBUTION, discover, load
from forge_train_tools import hook_table
from forge_train_tools.hook_table import hooks, implements
from forge_train_tools.testing import check

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "hook.md"
FILE = re.compile(r'^```\w+ title="(.+?)"\n(.*?)^```', re.MULTILINE | re.DOTALL)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The packages `judge` and `text_length` of the page."""
    files = dict(FILE.findall(PAGE.read_text(encoding="utf-8")))
    points = tomllib.loads(files.pop("pyproject.toml"))["project"]["entry-points"]
    site = tmp_path / "site"
    for name, groups in (
        ("judge", points),
        ("text_length", {"forge_train.plugins": {"length": "text_length.plugin:Length"}}),
    ):
        metadata = site / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        lines = [line for group, named in groups.items() for line in (f"[{group}]", *map(" = ".join, named.items()))]
        (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    for name, text in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    yield site
    for name in [one for one in sys.modules if one.split(".")[0] in ("judge", "text_length")]:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.usefixtures("site")
def test_the_hooks_of_the_page_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = toys.run(tmp_path / "runs", "judge", "length", steps=1)
    assert "nothing to do" not in caplog.text
    assert run.plugin("judge").score("abcd") == 8.0
    found = {one.name: one for one in check("length", folder=tmp_path).checks}
    assert found["score: tells texts apart"].status == "ok"
    assert not [one for one in found.values() if one.status == "fail"]


@pytest.mark.slow
@pytest.mark.usefixtures("site")
def test_it_lists_who_declares_calls_and_implements() -> None:
    said = forge("plugins", "hooks").out
    shown = re.search(r"```text\n(judge\.hookspecs.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown
    for line in shown[1].splitlines():
        assert re.search(r" +".join(map(re.escape, line.split())), said), line
    rows = {one["hook"]: one for one in json.loads(forge("plugins", "hooks", "--json").out)}
    assert rows["score"] == {
        "hook": "score",
        "kind": "slot",
        "optional": False,
        "summary": "The function that scores a text.",
        "declared_by": {"distribution": "judge", "version": "1.0", "module": "judge.hookspecs"},
        "called_by": ["judge"],
        "implemented_by": ["length"],
    }
    assert rows["optimizer"]["called_by"][0] == "forge_train"
    assert rows["attention"]["declared_by"]["module"] == "forge_train_kit.hookspecs"
    assert "decoder" in rows["attention"]["called_by"]
    assert rows["token_dispatch"]["called_by"] == ["hf", "moe"]
    assert rows["example_batch"]["called_by"] == ["forge_train_tools"]
    assert "csv" in rows["on_log"]["implemented_by"], "what its base implements"
    assert not {"judge", "text_length", "judge.hookspecs"} & sys.modules.keys()


@pytest.mark.slow
def test_a_module_may_call_the_hooks_that_it_declares(site: Path) -> None:
    plugin = (site / "judge" / "plugin.py").read_text(encoding="utf-8")
    own = (site / "judge" / "hookspecs.py").read_text(encoding="utf-8")
    both = f"{own}\n{plugin.replace('from judge.hookspecs import on_verdict, score', '')}"
    (site / "judge" / "hookspecs.py").write_text(both, encoding="utf-8")
    (site / "judge" / "plugin.py").write_text("", encoding="utf-8")
    points = site / "judge-1.0.dist-info" / "entry_points.txt"
    points.write_text(points.read_text(encoding="utf-8").replace("judge.plugin:", "judge.hookspecs:"), encoding="utf-8")
    rows = {one.spec.name: one for one in hooks()}
    assert rows["score"].callers == rows["on_verdict"].callers == ("judge",)
    renamed = plugin.replace("from judge.hookspecs import on_verdict, score", "import judge.hookspecs as own")
    renamed = renamed.replace("on_verdict(self.s", "own.on_verdict(self.s").replace(", score(2", ", own.score(2")
    (site / "judge" / "hookspecs.py").write_text(own, encoding="utf-8")
    (site / "judge" / "plugin.py").write_text(renamed, encoding="utf-8")
    points.write_text(points.read_text(encoding="utf-8").replace("judge.hookspecs:", "judge.plugin:"), encoding="utf-8")
    hook_table._source.cache_clear()
    rows = {one.spec.name: one for one in hooks()}
    assert rows["score"].callers == rows["on_verdict"].callers == ("judge",)


@pytest.mark.slow
def test_nothing_is_imported_for_it(site: Path) -> None:
    (site / "judge" / "__init__.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    code = f"""
import sys
sys.path[:] = {[str(site), *filter(None, sys.path)]!r}
from forge_train_tools.hook_table import hooks
assert "score" in [one.spec.name for one in hooks()]
print([name for name in sys.modules if name.startswith(("torch", "forge_train_plugins", "judge"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


OWN = [one for one in discover() if one.distribution == DISTRIBUTION]


@pytest.mark.parametrize("found", OWN, ids=lambda one: one.name)
def test_what_is_read_of_a_plugin_is_what_it_implements(found: PluginRef) -> None:
    assert implements(found) == implemented(load(found))

"""The directory of plugins: made without importing any, searched, and fed by reports."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_command import Forge
from forge_train.base.errors import ConfigError
from forge_train.plugin.calls import implemented
from forge_train.registry.discovery import DISTRIBUTION, discover, load
from forge_train_cli import directory
from forge_train_kit.facts import stated

Distribution = Callable[..., Path]
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))
listing = importlib.import_module("listing")

THEIRS = '''
from forge_train import Phase, Plugin, Transform, hookimpl
raise RuntimeError("imported")

class Base(Plugin):
    api = (1, 0)
    facts = {"plan.per_unit": True, "verify.rounds": 2**-4}

    @hookimpl
    def on_step(self, step): ...

class Theirs(Base):
    """Slices pancakes along tp."""
    facts = {"memory.saves": ("activations",)}

    @hookimpl
    def parallelize(self, job):
        return Transform(Phase.TENSOR, "pancake", job, covers=("tp", "precision"))
'''


def reported(**changes: Any) -> dict[str, Any]:
    one = {
        "name": "theirs", "role": "parallelism", "summary": "Slices pancakes.", "hooks": ["parallelize"],
        "axes": ["tp"], "facts": {}, "api": [1, 0], "distribution": "their-pancakes", "version": "1.5", "passed": True,
    }  # fmt: skip
    with_what = {"forge": "0.0.9", "api": [1, 0], "python": "3.11", "torch": "2.11"}
    return {"checked_with": with_what, "passed": True, "plugins": [one | changes]}


def found_for(forge: Forge, *words: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in forge("plugins", "search", *words, "--json").json}


def test_what_is_read_of_every_built_in_plugin_is_what_it_says_once_imported() -> None:
    listed = {one["name"]: one for one in json.loads(directory.FILE.read_text(encoding="utf-8"))}
    own = [ref for ref in discover() if ref.distribution == DISTRIBUTION]
    assert {ref.name for ref in own} <= listed.keys()
    for ref in own:
        plugin, one = load(ref), listed[ref.name]
        assert set(one["hooks"]) == implemented(plugin), ref.name
        assert one["api"] == list(plugin.api), ref.name
        facts = {name: list(value) if isinstance(value, tuple) else value for name, value in stated(plugin).items()}
        assert one["facts"].keys() == facts.keys(), ref.name
        assert {name for name, value in one["facts"].items() if value not in (None, facts[name])} == set(), ref.name
    assert listed["cp"]["axes"] == ["cp"]
    assert listed["fsdp2"]["axes"] == ["dp_replicate", "dp_shard"]


def test_a_plugin_of_another_distribution_is_found_and_not_imported(forge: Forge, distribution: Distribution) -> None:
    points = {"forge_train.plugins": {"the-irs": "pancakes:Theirs"}}
    root = distribution("their-pancakes", {"pancakes": THEIRS}, points)
    one = found_for(forge, "pancakes", "tp")["the_irs"]
    assert one == {
        "name": "the_irs",
        "role": "parallelism",
        "summary": "Slices pancakes along tp.",
        "hooks": ["on_step", "parallelize"],
        "axes": ["tp"],
        "facts": {"plan.per_unit": True, "verify.rounds": None, "memory.saves": ["activations"]},
        "api": [1, 0],
        "distribution": "their-pancakes",
        "version": "1.5",
        "checked": None,
        "installed": True,
    }
    assert "pancakes" not in sys.modules
    report = root / "pancakes.forge-plugin.json"
    report.write_text(json.dumps(reported(name="the_irs", version="1.4")), encoding="utf-8")
    assert found_for(forge, "the-irs")["the_irs"]["checked"]["forge"] == "0.0.9"
    text = forge("plugins", "search", "pancakes").out
    assert "their-pancakes 1.5, checked with Forge 0.0.9, API 1.0 at version 1.4)" in " ".join(text.split())
    report.write_text("{}", encoding="utf-8")
    done = forge("plugins", "search", "pancakes")
    assert "the_irs" in done.out
    assert "pancakes.forge-plugin.json: expected a report of `forge plugins check --report`" in done.err


def test_a_report_in_a_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_train.base.names import PluginRef

    (tmp_path / "waffles").mkdir()
    (tmp_path / "waffles" / "__init__.py").write_text("raise RuntimeError", encoding="utf-8")
    (tmp_path / "waffles" / "forge-plugin.json").write_text(json.dumps(reported()), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    ref = PluginRef("theirs", "their-waffles", "1.5", "waffles.deep.plugin:Theirs")
    problems: list[str] = []
    assert directory.entry(ref, problems)["checked"]["passed"] is True
    assert problems == []


def test_words_are_looked_for_everywhere_and_names_come_first(forge: Forge) -> None:
    assert {"tp", "fp8"} <= found_for(forge, "parallelize").keys()
    assert next(iter(found_for(forge, "muon"))) == "muon"
    assert list(found_for(forge, "lr-schedule", "cosine")) == ["cosine"]
    assert found_for(forge, "cosine")["cosine"]["installed"] is True
    assert "No plugin has 'muonn'. Did you mean 'muon'?" in forge("plugins", "search", "muonn").err
    assert forge("plugins", "search", "muonn", "--json").json == []
    assert "Missing argument" in forge("plugins", "search", fails=2).err


@pytest.mark.slow
def test_a_plugin_that_is_not_installed_says_how_to_get_it(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "reports" / "their-pancakes.json"
    file.parent.mkdir()
    file.write_text(json.dumps(reported()), encoding="utf-8")
    with_them = listing.entries(file.parent)
    monkeypatch.setattr(directory, "FILE", tmp_path / "plugins.json")
    directory.FILE.write_text(json.dumps(with_them), encoding="utf-8")
    text = " ".join(forge("plugins", "search", "pancakes").out.split())
    assert "their-pancakes 1.5, checked with Forge 0.0.9, API 1.0, not installed)" in text
    assert "Install with: forge plugins install their-pancakes" in text
    for wrong in (reported(passed=False), reported(version=""), reported(name="lion", distribution="forge-train")):
        file.write_text(json.dumps(wrong), encoding="utf-8")
        with pytest.raises(ValueError, match="their-pancakes.json"):
            listing.entries(file.parent)


@pytest.mark.parametrize("text", ["", "[]", '{"plugins": [{}]}', '{"checked_with": {}, "plugins": []}'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a report"):
        directory.read_report(tmp_path / "r.json")

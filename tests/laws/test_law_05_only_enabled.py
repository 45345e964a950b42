"""Law 5. Installing a plugin never runs it: only enabled plugins are imported, and a broken one breaks no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import toys
from forge_cli import environment, forge
from forge_train.registry.discovery import discover
from forge_train_tools.testing import installed

pytestmark = [pytest.mark.e2e]

DRIVER = """
import json, sys
from forge_train_cli.app import run
code = run(sys.argv[1:])
print(json.dumps({"code": code, "modules": [name for name in sys.modules if name.startswith("forge_train")]}))
"""


def imported(*arguments: object) -> set[str]:
    """Modules of forge that a command leaves imported in a process of its own."""
    command = [sys.executable, "-c", DRIVER, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["code"] == 0, ended.stderr
    return set(result["modules"])


@pytest.mark.slow
def test_a_run_imports_the_plugins_it_enables_and_no_other(tmp_path: Path) -> None:
    file = toys.write_config(tmp_path, "toys:ToyRest")
    aside = "gqa,lm_head,sdpa,swiglu,tensorboard,tokenizer"
    modules = imported("train", file, "--quiet", "--run-dir", tmp_path / "runs", "-p", "ema", "--without", aside)
    enabled = {"forge_train_contrib.ema"}
    enabled |= {
        f"forge_train_plugins.{name}"
        for name in ("observers.console", "observers.mfu", "resilience.copies", "resilience.out_of_memory")
    }
    plugins = {found.module: found.name for found in discover()}
    assert {module for module in plugins if module in modules} == enabled
    parts = {name for module in modules for name in module.split(".")[1:] if name.startswith("_")}
    assert parts <= {"_console", "_out_of_memory"}


def test_a_plugin_that_is_not_enabled_is_not_even_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tripwire.py").write_text("raise SystemExit('imported!')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with installed() as found:
        found.add_broken("tripwire", "tripwire:Plugin")
        found.add_broken("absent", "no.such.module:Plugin")
        found.add_broken("nonsense", "this is : not [an object")
        for arguments in (
            ("plugins", "list"),
            ("plugins", "list", "--json"),
            ("config", "show"),
            ("train", toys.write_config(tmp_path), "--quiet", "--run-dir", tmp_path / "runs"),
        ):
            ended = forge(*arguments)
            assert ended.code == 0, ended.err
            assert "tripwire" not in sys.modules
        listed = forge("plugins", "list", "--json").json
        assert {"tripwire", "absent", "nonsense", "lion"} <= {entry["name"] for entry in listed}
        for name in ("tripwire", "absent", "nonsense"):
            ended = forge("train", toys.write_config(tmp_path), "--quiet", "-p", name)
            assert ended.code == 2
            assert name in ended.err


@pytest.mark.slow
def test_a_default_that_steps_aside_is_not_imported(tmp_path: Path) -> None:
    modules = imported("config", "show", toys.write_config(tmp_path), "-p", "lion")
    assert "forge_train_plugins.optimizers.lion" in modules
    assert "forge_train_plugins.optimizers.adamw" in {found.module for found in discover()}
    assert not {module for module in modules if module.rpartition(".")[2] in ("adamw", "decoder", "text", "sample")}
    assert "torch" not in modules

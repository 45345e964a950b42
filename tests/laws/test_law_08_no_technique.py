"""Law 8. The core knows no technique: without any built-in plugin's file core imports, and `forge` runs without it."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import toys
from forge_cli import environment
from forge_train.registry.discovery import discover

pytestmark = [pytest.mark.e2e]

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "core/forge_train",
    "core/forge_train_kit",
    "core/forge_train_tools",
    "plugins/forge_train_plugins",
    "cli/forge_train_cli",
    "contrib/forge_train_contrib",
)
OWN: dict[str, str] = {}
"""Module → the name of a plugin that lies in it."""
for found in discover():
    if found.module.startswith(("forge_train_plugins.", "forge_train_contrib.")):
        OWN.setdefault(found.module, found.name)
ALONE = {module: [module] for module in sorted(OWN)}
TOGETHER = {
    folder: [module for module in ALONE if module.rpartition(".")[0] == folder]
    for folder in sorted({module.rpartition(".")[0] for module in OWN})
}

DRIVER = '''
"""Deletes one group of plugins after the other, and tries forge without it, from fresh modules each time."""
import contextlib, io, json, pathlib, shutil, sys

import torch

root, toys, results = pathlib.Path(sys.argv[1]), sys.argv[2], {}
own = json.loads(sys.argv[4])
for group, modules in json.loads(sys.argv[3]).items():
    aside, homes = pathlib.Path(root, "aside"), {}
    aside.mkdir()
    for module in modules:
        *folders, stem = module.split(".")
        home = root.joinpath(*folders)
        for name in (f"{stem}.py", stem, f"_{stem}.py", f"_{stem}"):
            if (path := home / name).exists():
                homes[name] = home
                shutil.move(path, aside / name)
    for name in [name for name in sys.modules if name.startswith(("forge_train", "toys"))]:
        del sys.modules[name]
    import forge_train
    assert forge_train.__file__.startswith(str(root)), forge_train.__file__
    from forge_train_cli.app import run
    result = results[group] = {}
    commands = {
        "help": ["--help"],
        "list": ["plugins", "list", "--json"],
        "train": ["train", toys, "--quiet", "--run-dir", str(root / "runs"), "-p", "toys:ToyRest"],
        **{f"needed {module}": ["plugins", "info", own[module]] for module in modules},
    }
    for name, arguments in commands.items():
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(arguments)
        result[name] = {"code": code, "out": out.getvalue() if name == "list" else "", "err": err.getvalue()}
    plugins = ("forge_train_plugins.", "forge_train_contrib.")
    result["imported"] = [name for name in sys.modules if name.startswith(plugins)]
    for path in aside.iterdir():
        shutil.move(path, homes[path.name] / path.name)
    aside.rmdir()
print(json.dumps(results))
'''


Results = dict[str, dict[str, dict[str, object]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return without(ALONE, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return without(TOGETHER, tmp_path_factory.mktemp("together"))


def without(groups: dict[str, list[str]], root: Path) -> Results:
    """What happens without each group of plugins."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / Path(package).name)
    config = toys.write_config(root)
    text = config.read_text(encoding="utf-8")
    idle = [
        "console",
        "copies",
        "mfu",
        "out_of_memory",
        "tensorboard",
        "gqa",
        "lm_head",
        "sdpa",
        "swiglu",
        "tokenizer",
    ]
    config.write_text(f"without = {idle}\n{text}", encoding="utf-8")
    env = environment()
    env["PYTHONPATH"] = f"{root}:{env['PYTHONPATH']}"
    command = [sys.executable, "-c", DRIVER, str(root), str(config), json.dumps(groups), json.dumps(OWN)]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=root)
    assert ended.returncode == 0, ended.stderr
    found: Results = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("folder", TOGETHER)
def test_without_a_folder_of_plugins_forge_runs(together: Results, folder: str) -> None:
    runs_without(TOGETHER[folder], together[folder])


@pytest.mark.extended
@pytest.mark.parametrize("module", ALONE)
def test_without_this_plugin_forge_runs(alone: Results, module: str) -> None:
    runs_without(ALONE[module], alone[module])


def runs_without(modules: list[str], result: dict[str, dict[str, object]]) -> None:
    for command in ("help", "list", "train"):
        assert result[command]["code"] == 0, result[command]["err"]
    listed = {entry["name"] for entry in json.loads(str(result["list"]["out"]))}
    assert len(listed) >= len(OWN) - len(modules)
    for module in modules:
        needed = result[f"needed {module}"]
        assert needed["code"] == 2, needed["err"]
        assert repr(OWN[module]) in str(needed["err"])
        assert OWN[module] in listed or module.startswith("forge_train_contrib.")
        assert module not in result["imported"]


def test_there_is_something_to_delete() -> None:
    assert len(OWN) > 10


@pytest.mark.unit
@pytest.mark.parametrize("folder", ["core", "cli"])
def test_no_plugin_is_named_in_an_import_of_core_or_of_the_command_line(folder: str) -> None:
    plugins = ("forge_train_plugins", "forge_train_contrib")
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] in plugins], file

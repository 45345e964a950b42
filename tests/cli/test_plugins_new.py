"""`forge plugins new` writes plugins that conform, as a package of their own and as a file of contrib."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Context, Group
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import forge_train_cli.new
import warm
from forge_train import __version__
from forge_train.plugin.calls import implemented
from forge_train_cli.app import run
from forge_train_cli.new import source
from forge_train_cli.snippets import SNIPPETS
from forge_train_tools.testing import assert_conforms

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_every_hook_it_knows_makes_a_plugin_that_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new_everything.py").write_text(source("everything", list(SNIPPETS.values())), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin = importlib.import_module("new_everything").Everything
    assert implemented(plugin) == SNIPPETS.keys()
    tree = ast.parse((tmp_path / "new_everything.py").read_text(encoding="utf-8"))
    for imports in (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module != "__future__"):
        home = importlib.import_module(str(imports.module))
        assert [one.name for one in imports.names if not hasattr(home, one.name)] == [], "also those of annotations"
    assert_conforms(plugin, strict=True, folder=tmp_path)


def test_linters_accept_what_it_writes(tmp_path: Path) -> None:
    for hook, snippet in SNIPPETS.items():
        (tmp_path / f"{hook}.py").write_text(source("one", [snippet]), encoding="utf-8")
    (tmp_path / "everything.py").write_text(source("everything", list(SNIPPETS.values())), encoding="utf-8")
    for command in (["format", "--check"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.e2e
def test_the_package_installs_and_passes_its_own_tests_and_the_check(tmp_path: Path) -> None:
    """By the commands of its own CI; the report that they leave is shipped."""
    assert run(["plugins", "new", "my-plugin", "--dir", str(tmp_path)]) == 0
    package, target = tmp_path / "forge-train-my-plugin", tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index", "--upgrade"]
    environment, rejected = os.environ | {"PYTHONPATH": str(target)}, False
    for command in (
        "pip",
        "forge plugins check my-plugin",
        *typed_by_ci(package),
        "pip",
        "forge plugins search my-plugin",
    ):
        words = command.replace("forge ", "forge_train_cli ").replace("pytest", "pytest -q -p no:cacheprovider").split()
        typed = [*pip, "--target", str(target), "."] if command == "pip" else [sys.executable, "-m", *words]
        done = ended(typed, package, environment)
        if "is still 'Say here in one line what it does" in done.stdout:
            assert done.returncode == 1
            for module in (package / "forge_train_my_plugin.py", target / "forge_train_my_plugin.py"):
                written = module.read_text(encoding="utf-8")
                module.write_text(written.replace("Say here in one line what it does", "Does it"), encoding="utf-8")
            rejected = True
            continue
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if "--report" in command:
            assert "✓ resumes exactly" in done.stdout
    assert rejected, "with the docstring of the scaffold"
    assert "checked with Forge" in done.stdout, "the report is in the wheel"
    assert "fails" not in (package / "forge_train_my_plugin.forge-plugin.svg").read_text(encoding="utf-8")


def ended(typed: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command that has ended, in a process of its own, where torch is imported already."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with warm.Popen(typed, cwd=folder, env=environment, **pipes) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(typed, process.returncode, out, err)


def workflow(package: Path) -> dict[str, Any]:
    text = (package / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    job: dict[str, Any] = yaml.safe_load(text)["jobs"]["test"]
    return job


def typed_by_ci(package: Path) -> list[str]:
    """The commands of the package's CI, after the installation."""
    typed = [step["run"] for step in workflow(package)["steps"] if "run" in step]
    found = [line for line in typed if not line.startswith("uv ")]
    assert [line.split()[0] for line in found] == ["pytest", "forge"]
    return found


def test_ci_takes_both_ends_of_the_range_of_forge(tmp_path: Path) -> None:
    assert run(["plugins", "new", "my-plugin", "--dir", str(tmp_path)]) == 0
    package = tmp_path / "forge-train-my-plugin"
    rows = workflow(package)["strategy"]["matrix"]["include"]
    assert {row["forge"]: row["resolution"] for row in rows} == {"oldest": "lowest-direct", "newest": "highest"}
    installs = [step.get("run", "") for step in workflow(package)["steps"]]
    assert "uv pip install --resolution ${{ matrix.resolution }} -e '.[test]'" in installs
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (forge,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "forge-train")
    assert str(min(forge.specifier, key=lambda one: one.operator != ">=")) == f">={__version__}"
    assert __version__ in forge.specifier
    assert "1000.0" not in forge.specifier
    assert all(row["python"] in SpecifierSet(project["requires-python"]) for row in rows)


def test_the_page_for_agents_shows_commands_that_exist(tmp_path: Path) -> None:
    from forge_train_cli.app import forge

    assert run(["plugins", "new", "my-plugin", "--dir", str(tmp_path)]) == 0
    text = (tmp_path / "forge-train-my-plugin" / "AGENTS.md").read_text(encoding="utf-8")
    assert "class `MyPlugin` in `forge_train_my_plugin.py`" in text
    lines = re.findall(r"^forge (.+)$", text, re.MULTILINE) + re.findall(r"`forge ([^`]+)`", text)
    assert len(lines) > 5
    for line in lines:
        command, context, words = forge, Context(forge), shlex.split(line, comments=True)
        while isinstance(command, Group):
            found = command.get_command(context, words.pop(0))
            assert found is not None, line
            command = found
        command.make_context(line, words)


def test_a_contributed_plugin_lies_in_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "contrib" / "forge_train_contrib"
    package.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(forge_train_cli.new, "folder", lambda name: package)
    assert run(["plugins", "new", "mine", "--contrib", "--hook", "optimizer"]) == 0
    assert "class Mine(Plugin)" in (package / "mine.py").read_text()
    assert "from forge_train_contrib.mine import Mine" in (tmp_path / "tests/contrib/test_mine.py").read_text()
    assert run(["plugins", "new", "mine", "--contrib"]) == 2


def test_contrib_needs_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forge_train_cli.new, "folder", lambda name: tmp_path / "site-packages" / name)
    assert run(["plugins", "new", "mine", "--contrib"]) == 2
    assert "checkout of forge" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Upper", "lower-case"),
        ("a b", "lower-case"),
        ("1st", "lower-case"),
        ("lambda", "lower-case"),
        ("train", "reserved"),
        ("cli", "reserved"),
        ("adamw", "already"),
    ],
)
def test_names_that_can_not_be(name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "new", name, "--dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "new", "twice", "--dir", str(tmp_path)]) == 0
    file = tmp_path / "forge-train-twice" / "README.md"
    file.write_text("mine")
    assert run(["plugins", "new", "twice", "--dir", str(tmp_path)]) == 2
    assert "README.md" in capsys.readouterr().err
    assert file.read_text() == "mine"

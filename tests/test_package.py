"""What is installed: five packages and nothing else, with their types and presets, from tested versions."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "forge_train": "core",
    "forge_train_tools": "core",
    "forge_train_kit": "core",
    "forge_train_plugins": "plugins",
    "forge_train_cli": "cli",
    "forge_train_contrib": "contrib",
}
"""Package → its folder."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_six_typed_packages(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def test_the_wheel_holds_everything_in_the_packages(wheel: zipfile.ZipFile) -> None:
    for package, folder in PACKAGES.items():
        files = [path for kind in ("*.py", "*.toml", "*.json") for path in (ROOT / folder / package).rglob(kind)]
        assert {str(path.relative_to(ROOT / folder)) for path in files} <= set(wheel.namelist())


def test_every_entry_point_names_a_file_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]
    targets = [*project["scripts"].values(), *points["forge_train.plugins"].values(), *points["pytest11"].values()]
    for target in targets:
        module = target.partition(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & set(wheel.namelist()), target


def test_every_direct_dependency_is_pinned_to_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    pins = re.findall(
        r"^([\w-]+)==[\w.]+$", (ROOT / "constraints/tested.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {re.split(r"[^\w-]", name)[0] for name in wanted} <= set(pins)


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """pytest's own list of folders to leave out has `dist`."""
    folders = {part for file in (ROOT / "tests").rglob("test_*.py") for part in file.relative_to(ROOT).parts[:-1]}
    left_out = pytestconfig.getini("norecursedirs")
    assert "dist" in folders
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in left_out)]

"""Packages outside of Forge, as pip installs them: modules, and the metadata of their distribution."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

OUTSIDE = Path(__file__).parent / "outside_packages"
"""Packages by somebody who knew Forge's pages and not its code."""


def package(folder: Path, name: str, files: dict[str, str], points: dict[str, dict[str, str]]) -> None:
    """A package as pip installs it: modules, and the metadata of a distribution of its name, version 1.0."""
    home = folder / name
    home.mkdir(parents=True)
    for file, text in {"__init__.py": "", **files}.items():
        (home / file).write_text(text, encoding="utf-8")
    _describe(folder, name, "1.0", {f"forge_train.{group}": named for group, named in points.items()})


def install(folder: Path, *names: str) -> None:
    """Packages of `outside_packages`, as pip installs them: what their `pyproject.toml` says."""
    for name in names:
        project = tomllib.loads((OUTSIDE / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        shutil.copytree(OUTSIDE / name / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        _describe(folder, project["name"], project["version"], project["entry-points"])


def _describe(folder: Path, name: str, version: str, points: Mapping[str, Mapping[str, str]]) -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    groups = [
        f"[{group}]\n" + "\n".join(f"{one} = {at}" for one, at in named.items()) for group, named in points.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")

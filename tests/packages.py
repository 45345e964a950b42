"""Packages outside of Forge, as pip installs them: modules, and the metadata of their distribution."""

from __future__ import annotations

from pathlib import Path


def package(folder: Path, name: str, files: dict[str, str], points: dict[str, dict[str, str]]) -> None:
    """A package as pip installs it: modules, and the metadata of a distribution of its name, version 1.0."""
    home, metadata = folder / name, folder / f"{name}-1.0.dist-info"
    for one in (home, metadata):
        one.mkdir(parents=True)
    for file, text in {"__init__.py": "", **files}.items():
        (home / file).write_text(text, encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    groups = [
        f"[forge_train.{group}]\n" + "\n".join(f"{one} = {at}" for one, at in named.items())
        for group, named in points.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")

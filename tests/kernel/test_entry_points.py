"""Entry points are read once in a process, and again once a package was installed or removed."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

import pytest

from forge_train.registry.discovery import discover, entry_points
from packages import package

pytestmark = pytest.mark.unit


def names() -> set[str]:
    return {found.name for found in discover()}


def test_they_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"adamw", "fsdp2"} <= names()
    monkeypatch.setattr(importlib.metadata, "entry_points", None)
    assert {"adamw", "fsdp2"} <= names()
    assert [point.name for point in entry_points("forge_train.nothing")] == []


def test_and_again_after_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert "new_one" not in names()
    package(tmp_path, "new_one", {"plugin.py": ""}, {"plugins": {"new_one": "new_one.plugin"}})
    assert "new_one" in names()
    shutil.rmtree(next(tmp_path.glob("*.dist-info")))
    assert "new_one" not in names()

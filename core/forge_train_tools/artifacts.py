"""The artifacts of a run, read from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from forge_train.base.strict_json import loads, odd
from forge_train_kit.artifacts import RECORDED, Artifact


def recorded(folder: Path) -> list[Artifact]:
    """The artifacts of a run, each as it was recorded last, by path; a line that was cut off is left out.

    Raises:
        ValueError: for a damaged line.
    """
    found: dict[str, Artifact] = {}
    for file in sorted((folder / RECORDED).glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                entry = loads(line)
                if problem := odd(entry, {"path": str, "bytes": int, "sha256": str, "plugin": str}):
                    raise ValueError(f"{file.name}: {problem}")
                one = Artifact(**entry)
                found[one.path] = one
    return [found[path] for path in sorted(found)]


def state(one: Artifact, folder: Path) -> Literal["whole", "changed", "missing"]:
    """Return the state of a run's artifact, judged by its size."""
    try:
        size = (folder / one.path).stat().st_size
    except OSError:
        return "missing"
    return "whole" if size == one.bytes else "changed"

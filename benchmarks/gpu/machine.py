"""What this machine has, and how Forge is found on it without pip."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "plugins", "cli", "contrib")
SPARED = ("torchao",)
"""Base dependencies that no case imports."""


def lacking() -> list[str]:
    """Forge's base dependencies that are not installed here, as pip wants them."""
    missing = []
    for wanted in _project()["dependencies"]:
        name = re.match(r"[A-Za-z0-9_.-]+", wanted)
        assert name is not None
        if name[0] in SPARED:
            continue
        try:
            importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            missing.append(wanted)
    return missing


def register(folder: Path) -> list[Path]:
    """Have Forge's plugins found in this checkout; returns what belongs on the path of Python.

    Plugins are entry points, which Python finds in a `dist-info` folder. Where pip has installed none, one is written
    from pyproject.toml.

    Args:
        folder: where it is written.
    """
    paths = [ROOT / one for one in FOLDERS]
    try:
        importlib.metadata.distribution("forge-train")
    except importlib.metadata.PackageNotFoundError:
        paths.append(_metadata(folder))
    return paths


def _metadata(folder: Path) -> Path:
    own = folder / "forge_train-0.dist-info"
    own.mkdir(parents=True, exist_ok=True)
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: forge-train\nVersion: 0\n", encoding="utf-8")
    project, lines = _project(), []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    (own / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]  # type: ignore[no-any-return]


def environment(paths: list[Path]) -> dict[str, str]:
    """Variables of a case's process."""
    given = os.environ.get("PYTHONPATH", "")
    path = [str(Path(__file__).parents[1]), *map(str, paths), *([given] if given else [])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def digest() -> str:
    """Of Forge's code and this suite's: results of other code are not kept."""
    found = hashlib.blake2b(digest_size=8)
    for folder in (*FOLDERS, "benchmarks/gpu"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".toml"):
                found.update(str(file.relative_to(ROOT)).encode())
                found.update(file.read_bytes())
    return found.hexdigest()


def describe(device: str) -> dict[str, Any]:
    """What results depend on, in words."""
    import torch

    cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name(0) if cuda else "cpu",
        "gpus": torch.cuda.device_count() if cuda else 0,
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30) if cuda else 0,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "executable": Path(sys.executable).name,
    }

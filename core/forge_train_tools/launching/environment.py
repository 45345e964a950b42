"""The environment that a run was started in."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train.mesh.world import World
from forge_train.registry.discovery import identity

from ..packing.secrets import is_secret

if TYPE_CHECKING:
    from ..configuration.request import Request

_READ = ("FORGE_", "OMP_", "MKL_", "CUDA_", "CUBLAS_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "RAYON_", "XDG_CACHE_")
"""Beginnings of the names of variables that Forge, torch or a tokenizer reads."""
_OWN = ("FORGE_LAUNCH", "FORGE_TRACEBACK", "FORGE_TRACE_HOOKS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
"""Beginnings of those that change no run, or that a launcher sets."""


def environment(request: Request | None = None) -> dict[str, Any]:
    """Return the content of environment.json.

    Args:
        request: of the run, to record its configuration as it was given.
    """
    import torch

    from forge_train import __version__

    return {
        "forge": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "git": _git(),
        "launcher": World.here().launcher,
        "argv": sys.argv,
        "folder": str(Path.cwd()),
        "packages": _packages(tuple((one, Path(one).stat().st_mtime_ns) for one in sys.path if Path(one).is_dir())),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_READ) and not name.startswith(_OWN) and not is_secret(name)
        },
        "given": _given(request) if request else None,
    }


@lru_cache(maxsize=1)
def _packages(path: tuple[tuple[str, int], ...]) -> dict[str, str]:
    """Name → version of what is installed, read again when a folder of the path changes."""
    return dict(sorted(map(identity, distributions())))


def _given(request: Request) -> dict[str, Any]:
    """The configuration as the user gave it, with the text of the file."""
    values = {key: getattr(request, key) for key in ("config", "model_from", "plugins", "without", "set")}
    file = Path(request.config)
    text = file.read_text(encoding="utf-8") if request.config.endswith(".toml") and file.is_file() else ""
    return {key: value for key, value in {**values, "text": text}.items() if value}


def _git() -> dict[str, Any] | None:
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
        status = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(status.strip())}

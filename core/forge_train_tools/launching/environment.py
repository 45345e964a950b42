"""The environment that a run was started in."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

from forge_train.mesh.world import World


def environment() -> dict[str, Any]:
    """Return the content of environment.json."""
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
    }


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

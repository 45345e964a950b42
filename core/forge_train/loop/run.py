"""The run folder: what a run is called, what it leaves behind, and everything needed to repeat it."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.files import remove_remains, write_json, write_whole
from ..config import Config
from ..mesh.world import World
from ..registry.write import to_toml
from ..run.run import Run, writing
from ..run.run_files import load

if TYPE_CHECKING:
    from ..plugin.job import Hooks

log = logging.getLogger("forge_train")

MODEL_FILES = "tokenizer"
"""Folder of files that go with the model, such as its tokenizer's, in a run and in each of its checkpoints."""


def describe_run(run: Run, config: Config, hooks: Hooks, *, fresh: bool) -> None:
    """Describe the run in its folder; a fresh one takes the files that it keeps anew.

    Raises:
        ConfigError: if it can't be written.
    """
    with writing(run.dir):
        (run.dir / "outcome.json").unlink(missing_ok=True)  # it has not ended yet
        for keeper in hooks.keepers.values():
            config = keeper.keep(config, hooks, run.dir, fresh=fresh)
        write_whole(run.dir / "config.toml", to_toml(config, hooks))
        write_json(run.dir / "plugins.json", plugin_list(hooks))
        write_json(run.dir / "environment.json", environment())


def set_aside(run: Run) -> Path:
    """Move what an earlier attempt left into `attempt-N/`, so that the run starts over in an empty folder.

    Raises:
        ConfigError: if it can't be written.
    """
    numbers = (found[1] for path in run.dir.iterdir() if (found := _ATTEMPT.match(path.name)))
    aside = run.dir / f"attempt-{1 + max(map(int, numbers), default=0)}"
    with writing(run.dir):
        aside.mkdir()
        for name in _MAKE_A_RUN:  # which the folder stays, also if this process is killed
            shutil.copyfile(run.dir / name, aside / name)
        if (files := run.dir / MODEL_FILES).is_dir():  # the configuration may name some
            shutil.copytree(files, aside / MODEL_FILES)
        remove_remains(run.checkpoints)
        for path in sorted(run.dir.iterdir()):
            if not _stays(path.name):
                path.rename(aside / path.name)
        run.checkpoints.mkdir()
    return aside


_MAKE_A_RUN = ("config.toml", "plugins.json")
_ATTEMPT = re.compile(r"attempt-(\d+)$")


def _stays(name: str) -> bool:
    """Return True if an entry of a run's folder is not moved: the open log, the lock, and files that are rewritten."""
    kept = ("log", MODEL_FILES, *_MAKE_A_RUN)
    return name in kept or name.startswith(".") or _ATTEMPT.match(name) is not None


def is_run(path: Path) -> bool:
    """Return True if a path is a run folder."""
    return all(_is_file(path / name) for name in _MAKE_A_RUN) and not is_checkpoint(path)


def is_kept(path: Path) -> bool:
    """Return True if a run has a checkpoint or metrics. It is then kept, whatever error ended it."""
    return is_run(path) and ((path / "metrics.jsonl").is_file() or any((path / "checkpoints").glob("step-*")))


def is_checkpoint(path: Path) -> bool:
    """Return True if a path is a checkpoint, complete or not."""
    return _is_file(path / "state.json")


def _is_file(path: Path) -> bool:
    """Return True if a path is an accessible file; False for a path that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def plugin_list(hooks: Hooks) -> list[dict[str, str]]:
    """Return the content of plugins.json, sorted by name."""
    return [
        {
            "name": enabled.name,
            "distribution": enabled.ref.distribution,
            "version": enabled.ref.version,
            "object": enabled.ref.object,
            "hash": enabled.ref.hash(),
        }
        for enabled in hooks.enabled.values()
    ]


def saved_plugins(checkpoint: Path) -> list[dict[str, str]]:
    """The plugins of a checkpoint's run; empty where they were not kept."""
    found: list[dict[str, str]] | None = load(checkpoint / "plugins.json", links=False)
    return found or []


def environment() -> dict[str, Any]:
    """Return the content of environment.json."""
    import torch

    from .. import __version__

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

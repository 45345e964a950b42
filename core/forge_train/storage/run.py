"""The run folder: what a run is called, what it leaves behind, and everything needed to repeat it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import ConfigError
from ..processes.world import World
from . import disk
from .records import EventSchema, Records, read

if TYPE_CHECKING:
    from ..registry.hooks import Hooks


@dataclass(frozen=True)
class Start:
    """Where a run begins: its folder, and what it continues from."""

    dir: Path
    checkpoint: Path | None = None
    """A checkpoint of another run to start from; one of this run is found in its folder."""
    continues: bool = False
    """Whether the folder holds this very run already."""

    def again(self, *, saved: bool) -> Start:
        """The same run, once its processes were lost; `saved` is whether it has a checkpoint of its own."""
        if self.checkpoint is not None and not saved:
            return self
        return Start(self.dir, continues=is_run(self.dir))


class Run:
    """One run's folder. Nothing is written before `open`."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder
        self.id = folder.name
        self._records = Records(folder)

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    def artifact(self, name: str) -> Path:
        """A path under the run's `artifacts/` for a plugin to write to; its folder exists."""
        path = self.dir / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def register(self, schema: EventSchema) -> None:
        """Make a plugin's kind of event known."""
        self._records.register(schema)

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Write a line of events.jsonl."""
        self._records.event(name, step, **fields)

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Write a line of metrics.jsonl."""
        self._records.metrics(line)

    def cut_metrics(self, step: int) -> None:
        """Drop metrics of steps after `step`."""
        self._records.cut(step)

    def last_loss(self) -> float | None:
        """The loss of the newest logged step."""
        loss = None
        for line in read(self._records.metrics_file):
            loss = line["loss"]
        return loss

    def open(self) -> None:
        """Make the folder.

        Raises:
            ConfigError: if it can't be written.
        """
        with self._writing():
            (self.dir / "log").mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)

    def describe(self, config: Config, hooks: Hooks, *, fresh: bool) -> None:
        """Describe the run in its folder; a fresh one loses what an earlier attempt left there.

        Raises:
            ConfigError: if it can't be written.
        """
        with self._writing():
            if fresh:
                for file in (self._records.metrics_file, self._records.events_file, self.dir / "outcome.json"):
                    file.unlink(missing_ok=True)
                shutil.rmtree(self.dir / "tensorboard", ignore_errors=True)
            from ..config.write import to_toml

            write_whole(self.dir / "config.toml", to_toml(config, hooks))
            write_json(self.dir / "plugins.json", plugin_list(hooks))
            write_json(self.dir / "environment.json", environment())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in disk.FULL:
                raise disk.refused(self.dir, error, "can't write the run folder:") from error
            raise ConfigError(f"{self.dir}: can't write the run folder: {error.strerror or error}.") from error

    def outcome(self) -> dict[str, Any]:
        """How the run ended last time; empty where it never did."""
        file = self.dir / "outcome.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def end(self, outcome: Mapping[str, Any]) -> None:
        with disk.writing(self.dir / "outcome.json"):
            write_json(self.dir / "outcome.json", outcome)


def is_run(path: Path) -> bool:
    """Whether a path is a run folder."""
    return (path / "config.toml").is_file() and (path / "plugins.json").is_file() and not is_checkpoint(path)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, whole or not."""
    return (path / "state.json").is_file()


def run_id(config: Config, notable: tuple[str, ...]) -> str:
    """`<preset or file>-<plugins of note>-<8 hex of the configuration>-<time>`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return "-".join([config.source, *notable[:4], config.digest()[:8], stamp])


def begin(config: Config, folder: Path, resume: str, notable: tuple[str, ...] = ()) -> Start:
    """Decide which folder a run is, and whether it continues something.

    Args:
        config: its configuration; a name makes it one run for ever.
        folder: where run folders are made.
        resume: `auto`, `never`, or the path of a run or a checkpoint.
        notable: plugins to name in a new run's id.

    Raises:
        ConfigError: for a path that is neither.
    """
    if resume not in ("auto", "never"):
        path = Path(resume)
        if is_run(path):
            if config.run.name not in ("", path.name):
                raise ConfigError(
                    f"--resume {resume} goes on in that folder; it can't be named {config.run.name!r} too."
                )
            return Start(path, continues=True)
        if not is_checkpoint(path):
            if not path.exists() and is_run(run := path.parent.parent):
                raise ConfigError(f"--resume {resume}: there is no such checkpoint; {_kept(run)}.")
            raise ConfigError(f"--resume {resume}: expected auto, never, or the path of a run or a checkpoint.")
        return Start(_unused(folder / (config.run.name or run_id(config, notable))), checkpoint=path)
    if not config.run.name:
        return Start(_unused(folder / run_id(config, notable)))
    named = folder / config.run.name
    if resume == "never":
        return Start(_unused(named))
    if named.exists() and not is_run(named) and not _unfinished(named):
        raise ConfigError(f"{named}: exists and is not a run; choose another --name or --run-dir.")
    return Start(named, continues=is_run(named))


def _unfinished(path: Path) -> bool:
    """Whether a folder holds nothing but what is written before it is a run, by a process that was killed just then."""
    known = ("log", "checkpoints", "config.toml")
    return path.is_dir() and all(one.name in known or one.name.endswith(".partial") for one in path.iterdir())


def _kept(run: Path) -> str:
    """Which checkpoints a run has."""
    names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    return f"the run has {', '.join(names)}" if names else "the run has none"


def _unused(path: Path) -> Path:
    number, candidate = 2, path
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def plugin_list(hooks: Hooks) -> list[dict[str, str]]:
    """What plugins.json holds, sorted by name."""
    return [
        {
            "name": enabled.name,
            "distribution": enabled.found.distribution,
            "version": enabled.found.version,
            "object": enabled.found.object,
            "hash": enabled.found.hash(),
        }
        for enabled in hooks.enabled.values()
    ]


def environment() -> dict[str, Any]:
    """What environment.json holds."""
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


def write_json(file: Path, value: object) -> None:
    write_whole(file, json.dumps(value, indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    part = file.with_name(f".{file.name}.partial")
    try:
        with part.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise

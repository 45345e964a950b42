"""The run folder: what a run is called, what it leaves behind, and everything needed to repeat it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import ConfigError, DivergedError
from ..failure import Failure
from ..processes.world import World
from ..strict_json import dumps, loads
from . import disk, lock, model_files
from .records import EventSchema, Records, read

if TYPE_CHECKING:
    from ..registry.hooks import Hooks


class Run:
    """One run's folder. Nothing is written before `open`."""

    def __init__(self, folder: Path, lock: Path | None = None) -> None:
        self.dir = folder
        self.id = folder.name
        self._lock = lock
        self._records = Records(folder)

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    def artifact(self, name: str) -> Path:
        """A path under the run's `artifacts/` for a plugin to write to; its folder exists."""
        path = self.dir / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def check_lock(self) -> None:
        """Whether the folder is still this job's.

        Raises:
            ForgeError: if another process took it over.
        """
        if self._lock is not None:
            lock.check(self._lock)

    def register(self, schema: EventSchema) -> None:
        """Make a plugin's kind of event known."""
        self._records.register(schema)

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Write a line of events.jsonl."""
        self.check_lock()
        self._records.event(name, step, **fields)

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Write a line of metrics.jsonl."""
        self.check_lock()
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
        with writing(self.dir):
            (self.dir / "log").mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)

    def describe(self, config: Config, hooks: Hooks, *, fresh: bool) -> None:
        """Describe the run in its folder; a fresh one takes the tokenizer's files anew.

        Raises:
            ConfigError: if it can't be written.
        """
        from ..config.write import to_toml

        with writing(self.dir):
            (self.dir / "outcome.json").unlink(missing_ok=True)  # it has not ended yet
            config = model_files.keep(config, hooks, self.dir, fresh=fresh)
            write_whole(self.dir / "config.toml", to_toml(config, hooks))
            write_json(self.dir / "plugins.json", plugin_list(hooks))
            write_json(self.dir / "environment.json", environment())

    def set_aside(self) -> Path:
        """Move what an earlier attempt left into `attempt-N/`, so that the run starts over in an empty folder.

        Raises:
            ConfigError: if it can't be written.
        """
        numbers = (found[1] for path in self.dir.iterdir() if (found := _ATTEMPT.match(path.name)))
        aside = self.dir / f"attempt-{1 + max(map(int, numbers), default=0)}"
        with writing(self.dir):
            aside.mkdir()
            for name in _MAKE_A_RUN:  # which the folder stays, also if this process is killed
                shutil.copyfile(self.dir / name, aside / name)
            if (tokenizer := self.dir / model_files.FOLDER).is_dir():  # the configuration may name the files in it
                shutil.copytree(tokenizer, aside / model_files.FOLDER)
            for path in sorted(self.dir.iterdir()):
                if not _stays(path.name):
                    path.rename(aside / path.name)
            self.checkpoints.mkdir()
        return aside

    def outcome(self) -> dict[str, Any]:
        """How the run ended last time; empty where it never did."""
        file = self.dir / "outcome.json"
        return loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def fail(self, failure: Failure, code: int, step: int, loss: float | None) -> None:
        """Write how the run failed."""
        outcome, reason = "diverged" if code == DivergedError.code else "failed", failure.message.partition("\n")[0]
        error = failure.as_json()
        try:
            self.event("run_finished", step, outcome=outcome, loss=loss, reason=reason, error=error)
        finally:  # on a full disk there may be room for one of them
            self.end({"outcome": outcome, "step": step, "loss": loss, "code": code, "error": error})

    def fail_first(self, failure: Failure, code: int, step: int, *, since: float) -> None:
        """Write how the run failed on the rank that failed first: rank 0 knows only what it saw itself, or was killed.

        Args:
            failure: of that rank.
            code: its exit code.
            step: the last that is known to have been done.
            since: when the processes were started; what rank 0 has written since then is replaced.
        """
        self._records.retract("run_finished", since)
        self.fail(failure, code, step, self.last_loss())

    def end(self, outcome: Mapping[str, Any]) -> None:
        """Write how the run ended."""
        self.check_lock()
        with disk.writing(self.dir / "outcome.json"):
            write_json(self.dir / "outcome.json", outcome)


_MAKE_A_RUN = ("config.toml", "plugins.json")
_ATTEMPT = re.compile(r"attempt-(\d+)$")


def _stays(name: str) -> bool:
    """Whether something in a run's folder is not moved: the log, which is open, the lock, and what is written anew."""
    kept = ("log", model_files.FOLDER, *_MAKE_A_RUN)
    return name in kept or name.startswith(".") or _ATTEMPT.match(name) is not None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What a user is told if a run's folder can't be written.

    Raises:
        ConfigError: if it can't.
    """
    try:
        yield
    except OSError as error:
        if error.errno in disk.FULL:
            raise disk.refused(folder, error, "can't write the run folder:") from error
        raise ConfigError(f"{folder}: can't write the run folder: {error.strerror or error}.") from error


def is_run(path: Path) -> bool:
    """Whether a path is a run folder."""
    return all(_is_file(path / name) for name in _MAKE_A_RUN) and not is_checkpoint(path)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, whole or not."""
    return _is_file(path / "state.json")


def _is_file(path: Path) -> bool:
    """Whether a path is a file that can be looked at; one that is too long is none."""
    try:
        return path.is_file()
    except OSError:
        return False


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
    write_whole(file, dumps(value, indent=1) + "\n")


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

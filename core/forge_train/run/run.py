"""The folder of a run, as plugins see it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, DivergedError, Failure, describe
from ..base.files import FULL, disk_errors, load_json, refused, write_json
from ..base.strict_json import COUNT, NUMBER, PAIRS, check_text, odd
from .records import EventSchema, Records, read

log = logging.getLogger("forge_train")

MODEL_FILES = "tokenizer"
"""Folder of files that go with the model, such as its tokenizer's, in a run and in each of its checkpoints."""
MAKE_A_RUN = ("config.toml", "plugins.json")
"""Files that every run has."""


def is_run(path: Path) -> bool:
    """Return True if a path is a run folder."""
    return all(_is_file(path / name) for name in MAKE_A_RUN) and not is_checkpoint(path)


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


class Recorder:
    """Records files that a process has written; this base knows only which.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.files: list[Path] = []
        """Files that this process has recorded, or is about to record, in order."""

    def record(self, path: Path, plugin: str, where: str) -> None:
        """Record a file, or every file of a folder, as it is now.

        Args:
            path: of either.
            plugin: its author.
            where: the name of the file of records, such as `rank-0`, that no other process writes.

        Raises:
            FileNotFoundError: if there is none.
        """
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise FileNotFoundError(f"{path} can't be recorded: there is no such file.")
        self.files += files

    def settle(self) -> None:
        """Wait until everything is recorded."""


def unlocked() -> None:
    """Stands for the check of a lock where there is none."""


class Run:
    """One run's folder. Nothing is written before `open`.

    Args:
        folder: the folder.
        check_lock: raises a ForgeError if another job took the folder over; called before anything is written.
        recorder: records files.
    """

    def __init__(
        self, folder: Path, check_lock: Callable[[], None] = unlocked, recorder: type[Recorder] = Recorder
    ) -> None:
        self.dir = folder
        self.id = folder.name
        self.check_lock = check_lock
        self.records = Records(folder)
        self.artifacts = recorder(folder)

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    def artifact(self, name: str) -> Path:
        """A path under the run's `artifacts/` for a plugin to write to; its folder exists. Once the file is whole,
        `job.record` it."""
        path = self.dir / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def register(self, schema: EventSchema) -> None:
        """Make a plugin's kind of event known."""
        self.records.register(schema)

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Write a line of events.jsonl."""
        self.check_lock()
        self.records.event(name, step, **fields)

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Write a line of metrics.jsonl."""
        self.check_lock()
        self.records.metrics(line)

    def cut_metrics(self, step: int) -> None:
        """Drop metrics of steps after `step`."""
        self.records.cut(step)

    def last_loss(self, step: float = float("inf")) -> float | None:
        """The loss of the newest logged step, not counting those after `step`."""
        found = [line["loss"] for line in read(self.records.metrics_file, strict=False) if line["step"] <= step]
        return found[-1] if found else None

    def open(self) -> None:
        """Make the folder.

        Raises:
            ConfigError: if it can't be written.
        """
        with writing(self.dir):
            (self.dir / "log").mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)

    def outcome(self) -> dict[str, Any]:
        """Return how the run ended last time; empty if it has not ended yet or the file is damaged."""
        file = self.dir / "outcome.json"
        try:
            return load(file) or {}
        except ConfigError:
            log.warning("%s is damaged, and is left out.", file)
            return {}

    def fail(self, failure: Failure, code: int, step: int, loss: float | None) -> None:
        """Write how the run failed."""
        outcome, reason = "diverged" if code == DivergedError.code else "failed", failure.message.partition("\n")[0]
        error = failure.as_json()
        try:
            self.event("run_finished", step, outcome=outcome, loss=loss, reason=reason, error=error)
        finally:  # on a full disk there may be room for one of them
            self.end({"outcome": outcome, "step": step, "loss": loss, "code": code, "error": error})

    def fail_again(self, failure: Failure, code: int, step: int, *, since: float) -> None:
        """Replace the record of a failure: by the one of the rank that failed first, or by one that explains it.

        Args:
            failure: the new one.
            code: its exit code.
            step: the last that is known to have been done.
            since: a record that is older is kept, and another is written.
        """
        self.records.retract("run_finished", since)
        self.fail(failure, code, step, self.last_loss())

    def end(self, outcome: Mapping[str, Any]) -> None:
        """Write how the run ended."""
        self.check_lock()
        with disk_errors(self.dir / "outcome.json"):
            write_json(self.dir / "outcome.json", outcome)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError while writing a run's folder into a message for the user.

    Raises:
        ConfigError: if the folder can't be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise refused(folder, error, "can't write the run folder:") from error
        raise ConfigError(f"{folder}: can't write the run folder: {error.strerror or error}.") from error


_LARGEST = 64 << 20
"""Bytes of a file that are read."""
SHAPES: Mapping[str, Any] = {
    "plugins.json": [{"name": str, "version": str, "hash": str, "distribution?": str, "object?": str}],
    "environment.json": {"devices?": [str], "argv?": [str], "git?": ({"commit": str, "dirty": bool}, type(None))},
    "composition.json": [{"phase": str, "plugin": str, "matched": [str], "note": str}],
    "outcome.json": {
        "outcome": str,
        "step": int,
        "loss": NUMBER,
        "code?": int,
        "error?": (dict, type(None)),
    },
    "left_out.json": PAIRS,
    ".roll_back.json": {"before": (COUNT, type(None)), "left_out": PAIRS, "elsewhere": COUNT, "*": ()},
}
"""File → what it holds, as `odd` takes it."""


def load(file: Path, *, links: bool = True) -> Any:
    """Return the content of a run's file; None if there is no such file.

    Args:
        file: one of `SHAPES`.
        links: whether it may be a link, as in a run's folder; a checkpoint may come from anyone.

    Raises:
        ConfigError: if it can't be read, or has the wrong shape.
    """
    try:
        if not file.exists():
            return None
        found = load_json(file, most=_LARGEST, links=links)
        check_text(found)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: can't be read: {describe(error).partition(chr(10))[0][:200]}.") from error
    if problem := odd(found, SHAPES[file.name]):
        raise ConfigError(f"{file}: can't be read: {problem}. Put it back as it was.")
    return found

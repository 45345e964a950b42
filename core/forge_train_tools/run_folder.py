"""A run, read from its folder."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train.base.errors import ConfigError, nearest
from forge_train.run.records import read
from forge_train.run.run import is_run, load
from forge_train_kit.artifacts import RECORDED

from .artifacts import recorded, state

if TYPE_CHECKING:
    from .evaluation.results import TaskResult

_NOTHING: dict[str, Any] = {}


class RunFolder:
    """A run, read from its folder: while it trains, or after its end.

    Files are read when they are needed, and once.

    Raises:
        ConfigError: when it reads a damaged file; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().name

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r}: {self.outcome}, step {self.step})"

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for each logged step: `step`, `loss`, `grad_norm`, `lr`, `tokens_per_second`, …"""
        return self._records("metrics.jsonl")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """A row for each event: `run_started`, `checkpoint_saved`, `evaluation`, …"""
        return self._records("events.jsonl")

    @cached_property
    def config(self) -> dict[str, Any]:
        """Dotted key → value."""
        try:
            tree = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{self.path / 'config.toml'}: can't be read: {error}") from error
        return dict(flat(tree))

    @cached_property
    def plugins(self) -> list[dict[str, str]]:
        return [{"distribution": "", **one} for one in self._json("plugins.json") or ()]

    @cached_property
    def environment(self) -> dict[str, Any]:
        return dict(self._json("environment.json") or {})

    @cached_property
    def composition(self) -> list[dict[str, Any]]:
        """The plugins' changes to the model, in order."""
        return list(self._json("composition.json") or ())

    @cached_property
    def _end(self) -> dict[str, Any]:
        return dict(self._json("outcome.json") or {})

    @property
    def outcome(self) -> str:
        """`done`, `interrupted`, `diverged` or `failed`; `unfinished` for a run that still trains, or was killed."""
        return str(self._end.get("outcome", "unfinished"))

    @property
    def reason(self) -> str:
        finished = [event for event in self.events if event["event"] == "run_finished"]
        return str(finished[-1]["reason"]) if finished and self._end else ""

    @property
    def step(self) -> int:
        """Last step."""
        return int(self._end.get("step", self.last.get("step", 0)))

    @property
    def loss(self) -> float | None:
        """Loss of the last step; None if none was logged."""
        return self._end.get("loss", self.last.get("loss"))

    @property
    def last(self) -> dict[str, Any]:
        """The newest line of metrics."""
        return self.metrics[-1] if self.metrics else _NOTHING

    @property
    def losses(self) -> list[float]:
        """Loss of each logged step."""
        return [float(line["loss"]) for line in self.metrics]

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Step, loss and metrics of each logged step, without those that were undone by going back to a checkpoint."""
        found: list[dict[str, Any]] = []
        for event in self.events:
            if event["event"] == "resumed":
                found = [one for one in found if one["step"] <= event["step"]]
            elif event["event"] == "evaluation":
                found.append({"step": event["step"], "loss": event["loss"], **event["metrics"]})
        return found

    @property
    def evaluation(self) -> dict[str, Any]:
        return self.evaluations[-1] if self.evaluations else _NOTHING

    @property
    def changed(self) -> float:
        """Time of the run's last write, in seconds since 1970."""
        files = [self.path / name for name in ("outcome.json", "events.jsonl", "metrics.jsonl", "config.toml")]
        return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)

    def checkpoints(self) -> Iterator[tuple[Path, int]]:
        """Path and bytes of each checkpoint, newest first."""
        for path in sorted((self.path / "checkpoints").glob("step-*"), reverse=True):
            yield path, sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    @cached_property
    def artifacts(self) -> list[dict[str, Any]]:
        """Artifacts that plugins recorded: path, size, hash, author, and whether the file still exists."""
        try:
            return [{**asdict(one), "state": state(one, self.path)} for one in recorded(self.path)]
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.path / RECORDED}: can't be read: {error}") from error

    @cached_property
    def tasks(self) -> dict[str, TaskResult]:
        """Results of `forge eval --task` on the last checkpoint that has some, by task."""
        from .evaluation.results import FOLDER, read

        return read(self.path) if (self.path / FOLDER).is_dir() else {}

    def summary(self) -> dict[str, Any]:
        """The run's entry in `forge runs list --json`."""
        return {
            "run": str(self.path),
            "outcome": self.outcome,
            "step": self.step,
            "loss": self.last.get("loss"),
            "evaluation": self.evaluation or None,
            "plugins": [one["name"] for one in self.plugins],
            "changed": self.changed,
        }

    def details(self) -> dict[str, Any]:
        """The output of `forge runs show --json`."""
        return {
            **self.summary(),
            "reason": self.reason,
            "metrics": self.metrics,
            "evaluations": self.evaluations,
            "tasks": {name: one.plain(whole=False) for name, one in self.tasks.items()},
            "config": self.config,
            "environment": self.environment,
            "checkpoints": [str(path) for path, _ in self.checkpoints()],
            "artifacts": self.artifacts,
        }

    def check(self) -> None:
        """Read every file of the run.

        Raises:
            ConfigError: naming a damaged one.
        """
        self.details()
        _ = self.composition

    def _records(self, name: str) -> list[dict[str, Any]]:
        try:
            return list(read(self.path / name))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path / name}: can't be read: {error}") from error

    def _json(self, name: str) -> Any:
        return load(self.path / name)


def open_run(name: str | Path | None = None, run_dir: str | Path = "runs") -> RunFolder:
    """Open a run to read its metrics, events, configuration and outcome.

    Args:
        name: a path, or a name in the folder of runs; by default the newest run.
        run_dir: the folder of runs.

    Raises:
        ConfigError: if there is no such run.
    """
    folder = Path(run_dir)
    if name is None:
        found = runs_in(folder)
        if not found:
            raise ConfigError(f"No runs in {folder}. Start one with: forge train")
        return found[0]
    for path in (Path(name), folder / name):
        if is_run(path):
            return RunFolder(path)
    hint = nearest(Path(name).name, [run.name for run in runs_in(folder)])
    raise ConfigError(f"{name}: there is no such run, here or in {folder}.{hint}")


def runs_in(folder: Path) -> list[RunFolder]:
    """The runs of a folder, the most recently written first.

    Raises:
        ConfigError: if it is not a folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder of runs.")
    found = [RunFolder(path) for path in folder.glob("*") if is_run(path)]
    return sorted(found, key=lambda run: (-run.changed, run.name))


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys whose values differ between runs, with the values; None if a run lacks the key."""
    keys = sorted({key for config in configs for key in config})
    rows = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def flat(table: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in nested tables."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, (*prefix, name))
        else:
            yield ".".join((*prefix, name)), value

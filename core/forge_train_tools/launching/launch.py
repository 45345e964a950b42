"""Starting several local processes, and saying in a few lines how they ended. Known without torch.

The processes are commands (`python -m forge_train_tools.launching.launched FOLDER`) that are given a folder:
`job.json` there says what to do, and each leaves how it ended in `outcome-ATTEMPT-RANK.json`. Only a failure (exit
code 1) is a failure to the elastic agent, which starts all of them again; whatever else ends a run is told by the
outcome.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forge_train.base.errors import INTERRUPTED, ConfigError, DivergedError, Failure, ForgeError
from forge_train.base.files import write_json
from forge_train.base.format import format_list
from forge_train.base.strict_json import loads
from forge_train.mesh.layout import Layout
from forge_train_kit.ranks import coordinates, in_words

from .world import here

RESERVED = 16_384
"""Bytes of a rank's outcome that there is room for in any case."""
ExitKind = Literal["own", "lost", "timeout", "killed", "hung"]
"""Why a rank ended: an error of its own, one because another rank was gone or did not come in time, a signal, or it
did not end at all."""


@dataclass(frozen=True)
class WorkerResult:
    """Result of one rank."""

    rank: int
    code: int
    """Of the command, as it would be in one process."""
    kind: ExitKind = "own"
    message: str = ""
    """Its failure, as the user reads it."""
    result: dict[str, Any] = field(default_factory=dict)
    """Return value of its task."""
    failure: dict[str, Any] = field(default_factory=dict)
    """Its `Failure`, if it could say."""
    coordinates: dict[str, int] = field(default_factory=dict)
    """Its place in the mesh, if that is known: see `Layout.coordinates`."""
    disk_full: bool = False
    """True if it failed because a disk was full, so that another attempt would fail too."""

    @property
    def who(self) -> str:
        """`Rank 3 (stage 1, dp_shard 1)`"""
        return _ranks([self])

    @property
    def well(self) -> bool:
        return self.code in (0, INTERRUPTED)

    def as_failure(self) -> Failure:
        """Return its failure as far as it is known."""
        if self.failure:
            return Failure(**self.failure)
        return Failure(
            "internal" if self.kind == "killed" else "communication", f"{self.who} {self.message}", self.rank
        )


@dataclass(frozen=True)
class WorkerCommand:
    """Work of the processes: each calls a function with the same arguments."""

    function: str
    """`module:name`; returns JSON in which `code` is the exit code."""
    arguments: Mapping[str, Any]
    folder: Path
    """For `job.json` and the outcomes; emptied first."""
    logs: Path
    """Folder of `rank-N.log`."""
    quiet: bool = False
    """Make rank 0 too write into its log instead of on the screen."""
    layout: Layout = field(default_factory=Layout)
    """Of the processes, for messages; by default none is known."""
    smaller: Mapping[int, Layout] = field(default_factory=dict)
    """Numbers of processes with which it may go on where places are lost (see `Places`), with their layouts."""

    def write(self, nproc: int) -> None:
        """Write what the processes are told, and reserve room for what each has to say on a disk that is full then."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        job = {
            "function": self.function,
            "arguments": dict(self.arguments),
            "logs": str(self.logs.absolute()),
            "quiet": self.quiet,
            "path": sys.path,
            "argv": sys.argv,
        }
        write_json(self.folder / "job.json", job)
        for rank in range(nproc):
            _reserve(self.folder, rank).write_bytes(bytes(RESERVED))

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def placed(self, outcomes: Iterable[WorkerResult], world: int) -> list[WorkerResult]:
        """The same with the ranks' coordinates among so many."""
        layout = self.smaller.get(world, self.layout)
        return [dataclasses.replace(one, coordinates=coordinates(layout, one.rank)) for one in outcomes]


@dataclass(frozen=True)
class Restart:
    """The processes are about to be started again."""

    why: str
    """In a sentence or two."""
    first: WorkerResult
    """Result of the rank that failed first."""
    attempt: int
    """From 1 on."""
    world: int
    """Number of processes of the next attempt."""


@dataclass(frozen=True)
class Ended:
    """Outcome of all processes in their last attempt."""

    outcomes: Sequence[WorkerResult]
    """Those that ended badly come first, and of them the one that began it."""
    signal: int = 0
    """The signal that ended them at once, before they could save."""

    @property
    def first(self) -> WorkerResult:
        return self.outcomes[0]

    @property
    def result(self) -> dict[str, Any]:
        """Return value of the task on rank 0."""
        return next((one.result for one in self.outcomes if one.rank == 0), {})

    @property
    def code(self) -> int:
        if self.signal:
            return 128 + self.signal
        return self.first.code

    def check(self) -> None:
        """Raise what went wrong, if anything did.

        Raises:
            KeyboardInterrupt: if a signal ended them.
            ForgeError: with the message of the rank that failed first.
        """
        if self.signal:
            raise KeyboardInterrupt
        if complaint := self.complaint():
            kinds = {kind.code: kind for kind in (ConfigError, DivergedError)}
            raise kinds.get(self.code, ForgeError)(complaint)

    def complaint(self) -> str:
        """Failure of the rank that began it, and the others in a line; empty if nothing failed."""
        bad = [one for one in self.outcomes if not one.well]
        if not bad:
            return ""
        first, *others = bad
        if len(bad) == len(self.outcomes) and all(one.kind == "own" and _line(one) == _line(first) for one in bad):
            return first.message  # a mistake that every rank found
        colon = "" if first.kind in ("killed", "hung") else ":"
        alike = [one for one in others if one.kind == first.kind == "own" and _sense(one) == _sense(first)]
        if alike and first.code == ConfigError.code and all(one in alike or one.kind == "lost" for one in others):
            return first.message  # the rest was lost before it could find the same mistake
        lines = [f"{_ranks([first, *alike])}{colon} {first.message}"]
        unlike = [one for one in others if one.kind in ("own", "killed") and one not in alike]
        lines += [f"{one.who} failed too: {_line(one)}" for one in unlike][:3]
        lost = [one for one in others if one.kind in ("lost", "timeout", "hung")]
        if lost:
            where = awaited(others)
            lines.append(f"{_ranks(lost)} ended because of it{f', in {where}' if where else ''}.")
        return "\n".join(lines)


def awaited(outcomes: Iterable[WorkerResult]) -> str:
    """The collective in which ranks waited for another; empty where none of them says."""
    lost = (outcome.message for outcome in outcomes if outcome.kind in ("lost", "timeout"))
    found = (re.search(r"at \S*torch/distributed\S*, in (\w+)", message) for message in lost)
    return next((match[1] for match in found if match), "")


def _line(outcome: WorkerResult) -> str:
    return outcome.message.splitlines()[0] if outcome.message else f"exit code {outcome.code}"


def _sense(outcome: WorkerResult) -> str:
    """Return a message without its numbers: a full disk has a little more or less room for the next rank."""
    return re.sub(r"\d[\d.,]*", "0", _line(outcome))


def _ranks(some: Sequence[WorkerResult]) -> str:
    """Their numbers, and the coordinates that all of them share."""
    shared = set.intersection(*(set(one.coordinates.items()) for one in some))
    where = {axis: at for axis, at in some[0].coordinates.items() if (axis, at) in shared}
    return f"Rank{'s' * (len(some) > 1)} {format_list(sorted(one.rank for one in some), 8)}{in_words(where)}"


def outcome_file(folder: Path, attempt: int, rank: int) -> Path:
    return folder / f"outcome-{attempt}-{rank}.json"


def leave(folder: Path, attempt: int, outcome: WorkerResult) -> None:
    """Write how this rank ended."""
    file, told = outcome_file(folder, attempt, outcome.rank), dataclasses.asdict(outcome)
    try:
        write_json(file, told)
    except OSError:
        _reserve(folder, outcome.rank).unlink(missing_ok=True)
        write_json(file, told)


def _reserve(folder: Path, rank: int) -> Path:
    return folder / f"reserved-{rank}"


def left(folder: Path, attempt: int, rank: int) -> WorkerResult | None:
    """Read the result that a rank left; None if it left none."""
    try:
        return WorkerResult(**loads(outcome_file(folder, attempt, rank).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def check_alone(option: str) -> None:
    """Check that this process may start others.

    Raises:
        ConfigError: if a launcher started it as one of several.
    """
    world = here()
    if world.launcher != "none":
        raise ConfigError(
            f"{option}: this process was started by {world.launcher} as rank {world.rank} of {world.size} already. "
            f"Leave {option.split(maxsplit=1)[0]} out, or start one process without {world.launcher}."
        )


def launch(
    task: WorkerCommand,
    nproc: int,
    *,
    max_restarts: int = 0,
    last_step: Callable[[], int] = lambda: 0,
    on_restart: Callable[[Restart], None] = lambda restart: None,
) -> Ended:
    """Run a task on local processes, by torchrun's elastic agent in this one.

    SIGINT, SIGTERM and SIGUSR1 go on to all of them; a second one ends them at once. They end when this process does.

    Args:
        task: what each of them does.
        nproc: how many.
        max_restarts: how often a failure starts all of them again.
        last_step: the step that is known to have been reached, for messages.
        on_restart: is told before they are started again.

    Raises:
        ConfigError: if this process is itself one of several.
    """
    check_alone(f"--nproc {nproc}")
    task.write(nproc)
    # As torchrun does, but with a share of the cores instead of one each.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(_cores()) // nproc, 1)))
    from .agent import run_agent

    try:
        return run_agent(task, nproc, max_restarts=max_restarts, last_step=last_step, on_restart=on_restart)
    finally:
        for rank in range(nproc):
            _reserve(task.folder, rank).unlink(missing_ok=True)
        for part in task.folder.glob(".*.partial"):  # of a process that was killed while it wrote how it ended
            part.unlink()


def _cores() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return list(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)

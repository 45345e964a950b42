"""The interface of a launcher, how one is found by its name, and how its client is called.

A distribution adds one through an entry point of the group `forge_train.launchers`, whose object is a subclass of
`Launcher`; `forge launch NAME` then exists, with an option for each field of its section:

    [project.entry-points."forge_train.launchers"]
    ours = "my_package:Ours"
"""

from __future__ import annotations

import json
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar

from forge_train.base.errors import ConfigError, ForgeError, describe, nearest
from forge_train.base.files import write_json
from forge_train.config.schema import section
from forge_train.config.tree import Key, Origin, Value
from forge_train.config.validate import plain, validate
from forge_train.registry.discovery import identity

from .job import TABLE, ClusterJob

GROUP = "forge_train.launchers"
MARK = "Written by forge launch"
"""A file that has this in its head may be written anew."""


@section
class NoOptions:
    """The section of a launcher without options of its own."""


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted."""

    name: str
    id: str
    """As the cluster knows it."""
    folder: Path
    """Working folder of the job."""


class Launcher(ABC):
    """Base of launchers: writes a job as a cluster's own files, and knows the commands of its client.

    A command is a list of arguments and never passes through a shell. A launcher without `status`, `logs` or `cancel`
    returns an empty list there.
    """

    Options: ClassVar[type] = NoOptions
    """Its section, `[launch.NAME]`."""
    rest: ClassVar[str] = ""
    """The field of `Options` that takes what follows CONFIG on the command line."""
    attached: ClassVar[bool] = False
    """True if `submit` is a command that runs the job on this terminal, until it ends."""

    plugins: ClassVar[tuple[str, ...]] = ()
    """Plugins of its runs, unless `--without` names them."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def variants(self) -> Sequence[Sequence[str]]:
        """Settings of each run of a job that has several; they are checked before anything is written."""
        return [[]]

    @abstractmethod
    def files(self, job: ClusterJob) -> Mapping[str, str]:
        """Name → text of the files; the first is what `submit` submits. Each has `MARK` near its beginning.

        Raises:
            ConfigError: for what this cluster can't do.
        """

    def existing(self, job: ClusterJob) -> Sequence[str]:
        """The command that prints a line for each job that already has this name; empty if `submit` refuses them."""
        return ()

    @abstractmethod
    def submit(self, job: ClusterJob, file: Path) -> Sequence[str]:
        """The command that submits a file."""

    def submitted(self, job: ClusterJob, said: str) -> str:
        """The job's id, from what the client printed."""
        return job.name

    def status(self, job: Submitted) -> Sequence[str]:
        return ()

    def logs(self, job: Submitted) -> Sequence[str]:
        return ()

    def cancel(self, job: Submitted) -> Sequence[str]:
        return ()


def points() -> dict[str, list[EntryPoint]]:
    """Entry points by name, without importing one."""
    found: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        found.setdefault(point.name, []).append(point)
    return found


def find(name: str) -> type[Launcher]:
    """The launcher of a name.

    Raises:
        ConfigError: if there is none, or several, or it can't be imported.
    """
    known = points()
    if name not in known:
        raise ConfigError(f"There is no launcher {name!r}.{nearest(name, known)} Launchers: {', '.join(known)}.")
    point, *others = known[name]
    if others:
        owners = " and ".join(" ".join(identity(one.dist)) for one in known[name])
        raise ConfigError(f"{owners} each provide the launcher {name!r}; uninstall all but one.")
    try:
        found = point.load()
    except Exception as error:  # a module may raise anything when it is imported
        raise ConfigError(f"The launcher {name!r}: {point.value} can't be loaded: {describe(error)}") from error
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise ConfigError(f"The launcher {name!r}: {point.value} is no subclass of {Launcher.__name__}.")
    if lacking := sorted(found.__abstractmethods__):
        raise ConfigError(f"The launcher {name!r}: {point.value} lacks {' and '.join(lacking)}.")
    return found


def client(command: Sequence[str], file: Path | None = None) -> str:
    """Call a cluster's client; returns what it printed.

    Args:
        command: its arguments; the first is its name.
        file: the file that it submits, for messages.

    Raises:
        ConfigError: if it is not installed here.
        ForgeError: with what it says, if it refuses.
    """
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        again = f" Submit it where there is one: {shlex.join(command)}" if file else ""
        raise ConfigError(f"There is no {command[0]} here.{again}") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ForgeError(f"{command[0]} refuses{f' {file}' if file else ''}: {said}")
    return done.stdout


def record(folder: Path, launcher: str, made: Launcher, job: Submitted) -> None:
    """Keep what `recall` needs, beside the job's files.

    Raises:
        ConfigError: if it can't be written.
    """
    told = {"id": job.id, "folder": str(job.folder), "options": plain(made.options)}
    try:
        write_json(_record_file(folder, launcher, job.name), told)
    except OSError as error:
        raise ConfigError(f"{folder}: can't keep the job's id {job.id}: {error.strerror or error}.") from error


def recall(folder: Path, launcher: str, name: str) -> tuple[Launcher, Submitted]:
    """The launcher, and the job that it submitted last under a name.

    Raises:
        ConfigError: if it submitted none from here.
    """
    file = _record_file(folder, launcher, name)
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        job = Submitted(name, str(told["id"]), Path(told["folder"]))
        origin = Origin("file", str(file))
        options: dict[Key, Value] = {(key,): Value(value, origin) for key, value in told["options"].items()}
    except FileNotFoundError:
        raise ConfigError(f"No job {name!r} was submitted with {launcher} from {folder.absolute()}.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: can't be read: {describe(error)}.") from error
    kind, mistakes = find(launcher), list[str]()
    chosen = validate(f"{TABLE}.{launcher}", kind.Options, options, mistakes)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return kind(chosen), job


def _record_file(folder: Path, launcher: str, name: str) -> Path:
    return folder / f"{file_name(name)}.{launcher}.json"


def file_name(name: str) -> str:
    """A job's name as a part of a file's."""
    return name.replace("/", "-").lstrip(".-") or "job"

"""The job that a launcher brings to a cluster: machines, container and environment, in the same words for all."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from forge_train.base.errors import ConfigError, nearest
from forge_train.config.schema import FilePath, Ge, section
from forge_train.config.tree import Key, Origin, Value
from forge_train.config.validate import validate

from ..configuration.toml import read

TABLE = "launch"
PORTS = range(20000, 30000)
"""Ports for jobs that name none: below those that systems assign automatically."""
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")
_MOUNT = re.compile(r"""(?P<source>([a-z0-9]+://)?[^:,'"\\]+):(?P<target>/[^:,'"\\]*)(?P<ro>:ro)?""")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_S = TypeVar("_S")


@section
class Machines:
    """The table `[launch]`: what a job asks of any cluster."""

    nodes: Annotated[int, Ge(1)] = 1
    """Nodes."""
    nproc: Annotated[int, Ge(1)] = 1
    """Processes on each node, with a GPU each unless run.device is cpu."""
    time: str = ""
    """The time limit of one job, as minutes, [days-]hours:minutes:seconds or days-hours; empty asks for none."""
    gpu: str = ""
    """The kind of GPU, as the cluster calls it; empty takes any."""
    cpus: Annotated[int, Ge(0)] = 0
    """Cores for each process; 0 leaves them to the cluster."""
    memory: Annotated[int, Ge(0)] = 0
    """Memory of each node, in GiB; 0 leaves it to the cluster."""
    queue: str = ""
    """The partition or queue."""
    account: str = ""
    """The account that pays."""
    image: str = ""
    """The container image; empty runs without a container."""
    python: str = ""
    """The Python that has Forge on the nodes; empty takes this one, or `python` in an image."""
    folder: Annotated[str, FilePath()] = ""
    """Working folder on the nodes; empty takes the present one."""
    mounts: tuple[str, ...] = ()
    """Folders that a container sees, as SOURCE:TARGET or SOURCE:TARGET:ro."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the processes."""
    requeue: bool = True
    """Continue a run that was interrupted after saving, until it is done."""
    max_restarts: Annotated[int, Ge(0)] = 0
    """Start the processes again after a failure, from the newest checkpoint, at most this often in one job."""


@dataclass(frozen=True)
class Mount:
    """A folder that a container sees."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class ClusterJob:
    """A run that is to train on a cluster, checked as far as every launcher needs."""

    name: str
    """Of the run, and of the job."""
    machines: Machines
    arguments: Sequence[str]
    """Of `forge`: `train`, and what follows."""
    folder: Path
    """Working folder of the processes."""
    run_dir: Path
    """Folder of run folders; absolute."""
    gpus: bool = True
    """True if each process has a GPU."""

    def __post_init__(self) -> None:
        asked = self.machines
        if not self.name.isprintable():
            raise ConfigError(f"--name: expected printable characters for the job's name, found {self.name!r}.")
        if asked.time and not _TIME.fullmatch(asked.time):
            raise ConfigError(f"--time {asked.time!r}: expected minutes, [days-]hours:minutes:seconds or days-hours.")
        for name, value in asked.env.items():
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(f"--env {name!r}: expected a name of letters, digits and _, as in NCCL_DEBUG=INFO.")
            if "\0" in value:
                raise ConfigError(f"--env {name}: an environment variable can't hold a zero byte.")
        for key in ("gpu", "queue", "account", "image", "python"):
            if not (value := getattr(asked, key)).isprintable() or value.startswith("-"):
                raise ConfigError(f"--{key}: expected a name of printable characters, found {value!r}.")
        if asked.gpu and not self.gpus:
            raise ConfigError(f"--gpu {asked.gpu}: the run has run.device = cpu, and takes no GPU.")
        if self.mounts and not asked.image:
            raise ConfigError(f"--mounts {asked.mounts[0]}: only a container has mounts; name its --image.")
        if asked.image:
            for what, folder in (("working folder", self.folder), ("run folder", self.run_dir)):
                self._check_seen(what, folder)

    def _check_seen(self, what: str, folder: Path) -> None:
        seen = [mount for mount in self.mounts if folder.is_relative_to(mount.target)]
        if not seen:
            raise ConfigError(
                f"The {what} {folder} lies in no mount, so it would be lost with the container: add "
                f"--mounts SHARED:{folder}, or name one that does."
            )
        if what == "run folder" and max(seen, key=lambda mount: len(mount.target)).read_only:
            raise ConfigError(f"The {what} {folder} is mounted read-only; a run writes there.")

    @property
    def mounts(self) -> list[Mount]:
        """The container's folders.

        Raises:
            ConfigError: for one that is none.
        """
        return [_mount(text) for text in self.machines.mounts]

    @property
    def world(self) -> int:
        return self.machines.nodes * self.machines.nproc

    @property
    def seconds(self) -> int:
        """The time limit; 0 for none."""
        return seconds(self.machines.time) if self.machines.time else 0

    @property
    def python(self) -> str:
        return self.machines.python or ("python" if self.machines.image else sys.executable)

    @property
    def command(self) -> list[str]:
        """Command of one process, whose launcher sets its rank."""
        return [self.python, "-m", "forge_train_cli", *self.arguments]

    @property
    def node_command(self) -> list[str]:
        """Command of one node, which starts its processes; where it is, and the others are, the environment says: see
        `forge_train_tools.launching.node`."""
        again = ["--max-restarts", str(self.machines.max_restarts)] if self.machines.max_restarts else []
        return [self.python, "-m", "forge_train_tools.launching.node", *again, "--", *self.arguments]

    @property
    def port(self) -> int:
        """The same one for all processes of a job, and as a rule another one for another job."""
        return PORTS[zlib.crc32(self.name.encode()) % len(PORTS)]


def _mount(text: str) -> Mount:
    found = _MOUNT.fullmatch(text)
    if found is None or not text.isprintable():
        raise ConfigError(
            f"--mounts {text!r}: expected SOURCE:TARGET or SOURCE:TARGET:ro, paths without commas, quotes or colons."
        )
    return Mount(found["source"], found["target"].rstrip("/") or "/", bool(found["ro"]))


def seconds(time: str) -> int:
    """A time limit in seconds."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, left = (*parts, 0, 0)[:3]
    else:  # minutes, minutes:seconds or hours:minutes:seconds
        hours, minutes, left = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + left


def described(
    file: str, launcher: str, options: type[_S], typed: Mapping[Key, Value], known: Sequence[str]
) -> tuple[Machines, _S]:
    """Read a job file, under what was typed: `[launch]`, and the launcher's own `[launch.NAME]`.

    Args:
        file: a TOML file; empty for none.
        launcher: its name.
        options: the launcher's section.
        typed: values by key path below `[launch]`.
        known: names of all launchers, whose tables the file may have too.

    Raises:
        ConfigError: for whatever is wrong in them, a line for each mistake.
    """
    values = {**dict(_of_file(file, known) if file else ()), **typed}
    own = {key[1:]: value for key, value in values.items() if key[0] == launcher and len(key) > 1}
    shared = {key: value for key, value in values.items() if key[0] not in known}
    mistakes: list[str] = []
    machines: Machines = validate(TABLE, Machines, shared, mistakes)
    chosen: _S = validate(f"{TABLE}.{launcher}", options, own, mistakes)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return machines, chosen


def _of_file(file: str, known: Sequence[str]) -> Iterator[tuple[Key, Value]]:
    document = read(Path(file))
    if other := next((key for key in document.data if key != TABLE), None):
        raise ConfigError(
            f"{file}:{document.line((other,))}: [{other}]: a job file has only the table [{TABLE}]; the run's own "
            "sections are CONFIG's."
        )
    table = document.data.get(TABLE, {})
    for name, value in (table if isinstance(table, Mapping) else {}).items():
        is_field = any(one.name == name for one in fields(Machines))
        if isinstance(value, Mapping) and not is_field and name not in known:
            raise ConfigError(
                f"{file}:{document.line((TABLE, name))}: [{TABLE}.{name}]: there is no launcher {name!r}."
                f"{nearest(name, known)} Launchers: {', '.join(known)}."
            )
        yield from _leaves((name,), value, document.path, lambda key: document.line((TABLE, *key)))


def _leaves(key: Key, value: Any, path: Path, line: Any) -> Iterator[tuple[Key, Value]]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _leaves((*key, name), one, path, line)
    else:
        yield key, Value(value, Origin("file", f"{path}:{line(key)}"))

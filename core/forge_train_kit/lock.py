"""The lock of a folder: one run belongs to one job, and one process writes a new folder.

A lock is a file `.lock.N` that names its owner. A process that finds a dead owner's lock makes the next number, which
only one process can do, then looks whether another lock has appeared, and only then removes the dead one. On one
machine, process ids tell whether an owner is dead; across machines, the owner touches its file as a sign of life. The
kernel's locks (`flock`) will not do: some network file systems do not pass them on.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from forge_train.base.errors import ConfigError, ForgeError
from forge_train.base.strict_json import dumps, loads

BEAT = 10.0
"""Seconds between two signs of life."""
SILENCE = 60.0
"""Seconds without one after which an owner on another machine is taken for dead."""
_NAME = re.compile(r"\.lock\.(\d+)$")
_PROC = Path("/proc")


@dataclass(frozen=True)
class Owner:
    """A process, as every other process can tell it."""

    pid: int
    host: str
    machine: str
    """Scope in which `pid` identifies this process: host, boot and PID namespace."""
    started: str
    """Start time of the process, on its machine's clock. A later process with the same id has a different one."""

    @classmethod
    def here(cls) -> Owner:
        host, parts = socket.gethostname(), []
        with suppress(OSError):
            parts.append((_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
            parts.append(str((_PROC / "self/ns/pid").readlink()))
        return cls(os.getpid(), host, " ".join([host, *parts]), _started(os.getpid()) or "")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def alive(self) -> bool:
        """Return True if it is still running; valid only on its own machine."""
        if started := _started(self.pid):
            return started == self.started
        try:
            os.kill(self.pid, 0)
        except OSError as error:
            return isinstance(error, PermissionError)  # another user's, and hidden from this one
        return False


class Lock:
    """This job's hold on a run's folder."""

    def __init__(self, file: Path, taken_from: str = "") -> None:
        self.file = file
        self.taken_from = taken_from
        """The dead owner that had the folder before, in words."""
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="forge-lock", daemon=True).start()

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            with suppress(OSError):
                os.utime(self.file)

    def release(self) -> None:
        """Let go of the folder."""
        self._released.set()
        self.file.unlink(missing_ok=True)


def take(
    folder: Path,
    waiting: Callable[[str], None] = lambda text: None,
    *,
    busy: Callable[[str], str] | None = None,
) -> Lock:
    """Lock a folder, which exists.

    Args:
        folder: of a run, unless `busy` says something else.
        waiting: is told why, if it takes longer to find out whether another owner is dead.
        busy: gives the message for a folder that another process has, from that process in words.

    Raises:
        ConfigError: if another process has it.
        OSError: if the folder can't be written.
    """
    mine, taken_from = dumps(asdict(Owner.here())) + "\n", ""
    while True:
        seen = {file: _text(file) for file in _files(folder)}
        for held in seen:
            taken_from = _dead(held, waiting, busy or partial(_training, folder)) or taken_from
        file = folder / f".lock.{1 + max(map(_number, seen), default=0)}"
        try:
            with file.open("x", encoding="utf-8") as out:
                out.write(mine)
        except FileExistsError:
            continue  # another process was faster
        except OSError:
            file.unlink(missing_ok=True)
            raise
        if any(seen.get(other) != _text(other) for other in _files(folder) if other != file):
            file.unlink(missing_ok=True)  # another process came between looking and locking: look again
            continue
        for dead in seen:
            dead.unlink(missing_ok=True)
        return Lock(file, taken_from)


def check(file: Path) -> None:
    """Check that a job still holds its lock.

    Raises:
        ForgeError: if another process took over the folder; a job that was suspended for long may be presumed dead.
    """
    if not file.exists() and (held := _files(file.parent)):
        owner = _owner(held[0]) or "another process"
        raise ForgeError(
            f"{file.parent}: {owner} took this run over, after {SILENCE:g} s without a sign of life from here. "
            "This process ends, and has written nothing since."
        )


def _training(folder: Path, owner: str) -> str:
    return f"{folder}: {owner} is training this run. Wait until it ends, or choose another --name."


def _dead(file: Path, waiting: Callable[[str], None], busy: Callable[[str], str]) -> str:
    """The owner of a lock that is dead, in words; empty if it let go.

    Raises:
        ConfigError: if it is alive.
    """
    owner, last = _owner(file), _touched(file)
    if not last:
        return ""
    name = str(owner or "a process that did not write its name")
    if owner and owner.machine == Owner.here().machine:
        if owner.alive():
            raise ConfigError(busy(name))
        return name
    silent = SILENCE - max(_now(file.parent) - last, 0)
    if silent > 0:
        waiting(f"{file.parent} is locked by {name}. Waiting up to {silent:.0f} s for a sign of life from it.")
    for _ in _until(time.monotonic() + silent):
        touched = _touched(file)
        if not touched:
            return ""
        if touched != last:
            raise ConfigError(busy(name))
    return name


def _until(deadline: float) -> Iterator[None]:
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
        yield


def _files(folder: Path) -> list[Path]:
    """The locks of a folder, the newest first."""
    return sorted((path for path in folder.iterdir() if _NAME.match(path.name)), key=_number, reverse=True)


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def _number(file: Path) -> int:
    found = _NAME.match(file.name)
    return int(found[1]) if found else 0


def _owner(file: Path) -> Owner | None:
    """Return the owner of a lock; None if it can't be read, as for a moment after the lock was made."""
    for _ in range(10):
        with suppress(OSError, ValueError, TypeError):
            return Owner(**loads(_text(file)))
        if not file.exists():
            return None
        time.sleep(0.02)
    return None


def _touched(file: Path) -> float:
    """The last sign of life, by the clock of the file system; 0 where the lock is gone."""
    with suppress(OSError), file.open("rb") as data:  # opened, so that a network file system asks its server
        return os.fstat(data.fileno()).st_mtime
    return 0.0


def _now(folder: Path) -> float:
    """The time by the clock of the file system."""
    probe = folder / f".{os.getpid()}-{socket.gethostname()}.partial"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _started(pid: int) -> str | None:
    """Return when a process started; None if it has ended, even if no one has collected its exit code yet."""
    if not (_PROC / "self/stat").exists():
        ps = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return ps.stdout.strip() or None
    try:
        state, *fields = (_PROC / f"{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]

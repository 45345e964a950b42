"""The file that a forward-only job writes: whole or absent, and continued where a kill has left it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.base.files import disk_errors, load_json, write_json
from forge_train.base.strict_json import COUNT, odd
from forge_train_kit.lock import take

from .forms import Form, JSONLines, Line

_STATE, _CHECKED = "job.json", "checked.json"
_MOST = 1 << 20
OPTIONS = ("--", "train.")
"""Beginnings of names of what a user chooses, and whose values are shown; others are digests."""
FLAG = "yes"
"""The value of an option that takes none; an empty one means that an option was not given."""
_CHECKED_SHAPE = {"made_of": {"*": str}, "records": COUNT}
_SHAPE = {"made_of": {"*": str}, "records": COUNT, "bytes": COUNT}


class OutputFile:
    """Records that are written beside their place; the file is made of them, and moved there, once all are there.

    Args:
        path: the file.
        made_of: what decides its content, by name.
        form: the kind of file.
        done: how many records it has so far.
        size: their bytes.
    """

    def __init__(self, path: Path, made_of: Mapping[str, str], form: Form, done: int = 0, size: int = 0) -> None:
        self.path, self.done = path, done
        self._made_of, self._form, self._size = dict(made_of), form, size
        self._part = partial_folder(path)
        self._lines = self._part / form.file

    @classmethod
    @contextmanager
    def open(
        cls, path: Path, made_of: Mapping[str, str], told: Callable[[str], None], form: Form | None = None
    ) -> Iterator[OutputFile]:
        """Hold the file's folder, and continue what is in it. The form is lines of JSON, if none is given.

        Raises:
            ConfigError: the file is there, another process writes it, or what was begun has other content.
        """
        part = partial_folder(path)
        if path.exists():
            raise ConfigError(f"--out: {path} exists; name a new file, or remove it.")
        if not path.parent.is_dir():
            raise ConfigError(f"--out: there is no folder {path.parent}; make it first.")
        with disk_errors(part):
            part.mkdir(exist_ok=True)
            lock = take(part, busy=lambda owner: f"--out: {owner} is writing {path}. Wait until it ends.")
        try:
            yield cls._continued(path, made_of, told, form or JSONLines())
        finally:
            lock.release()

    @classmethod
    def _continued(cls, path: Path, made_of: Mapping[str, str], told: Callable[[str], None], form: Form) -> OutputFile:
        part = partial_folder(path)
        if not (part / _STATE).is_file():
            new = cls(path, made_of, form)
            new._lines.write_bytes(b"")
            new._note()
            return new
        try:
            state = load_json(part / _STATE, most=_MOST)
            problem = odd(state, _SHAPE)
        except (OSError, ValueError) as error:
            state, problem = {}, str(error)
        if problem or (part / form.file).stat().st_size < state["bytes"]:
            raise ConfigError(f"--out: {part} is damaged{f': {problem}' if problem else ''}; remove it to begin anew.")
        if state["records"] and (apart := _apart(state["made_of"], made_of)):
            raise ConfigError(
                f"--out: {part} was begun {apart}. Repeat that command, or remove the folder to begin anew."
            )
        os.truncate(part / form.file, state["bytes"])
        if state["records"]:
            told(f"Continuing {path} after {state['records']:,} records.")
        return cls(path, made_of, form, state["records"], state["bytes"])

    def add(self, lines: Iterable[Line]) -> None:
        """Write some more; they are on disk when this returns.

        Raises:
            ConfigError: this kind of file can't hold one.
            DiskError: the disk refuses; what was there before stays.
        """
        found = [self._form.packed(line) for line in lines]
        with disk_errors(self._part), self._lines.open("r+b") as out:
            out.seek(self._size)
            out.write(b"".join(found))
            out.flush()
            os.fsync(out.fileno())
        self._size += sum(map(len, found))
        self.done += len(found)
        self._note()

    def finish(self) -> None:
        """Make the file, and give it its name."""
        with disk_errors(self.path):
            self._form.finished(self._lines).replace(self.path)
        shutil.rmtree(self._part, ignore_errors=True)

    def _note(self) -> None:
        with disk_errors(self._part):
            write_json(self._part / _STATE, {"made_of": self._made_of, "records": self.done, "bytes": self._size})


def _apart(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """A clause about what decides the content of a file and differs; empty if nothing does."""
    names = [name for name, value in now.items() if then.get(name) != value]
    if not (options := [name for name in names if name.startswith(OPTIONS) and name in then]):
        return f"with another {names[0]}" if names else ""
    each = [", ".join(_with(name, made_of[name]) for name in options) for made_of in (then, now)]
    return f"{each[0]}, and this command is {each[1]}"


def _with(name: str, value: str) -> str:
    if value == FLAG:
        return f"with {name}"
    return f"with {name} {value}" if value else f"without {name}"


def partial_folder(path: Path) -> Path:
    """The folder of what is not finished."""
    return path.with_name(f"{path.name}.partial")


def records_checked(path: Path, made_of: Mapping[str, str]) -> int:
    """The number of records, if all of them were checked for this file before; else 0."""
    try:
        found = load_json(partial_folder(path) / _CHECKED, most=_MOST)
    except (OSError, ValueError):
        return 0
    same = not odd(found, _CHECKED_SHAPE) and found["made_of"] == dict(made_of)
    return int(found["records"]) if same else 0


def note_checked(path: Path, made_of: Mapping[str, str], records: int) -> None:
    """Remember that all records were checked, in the folder of what is not finished.

    Raises:
        DiskError: the disk refuses.
    """
    with disk_errors(partial_folder(path)):
        write_json(partial_folder(path) / _CHECKED, {"made_of": dict(made_of), "records": records})

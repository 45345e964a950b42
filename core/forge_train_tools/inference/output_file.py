"""The file that a forward-only job writes: whole or absent, and continued where a kill has left it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.base.files import disk_errors, load_json, write_json
from forge_train.base.strict_json import COUNT, dumps, odd
from forge_train_kit.lock import take

_STATE, _LINES = "job.json", "records.jsonl"
_MOST = 1 << 20
_SHAPE = {"made_of": {"*": str}, "records": COUNT, "bytes": COUNT}


class OutputFile:
    """Lines of JSON that are written beside their place, and moved there once they are all there.

    Args:
        path: the file.
        made_of: what decides its content, by name.
        done: how many records it has so far.
        size: their bytes.
    """

    def __init__(self, path: Path, made_of: Mapping[str, str], done: int = 0, size: int = 0) -> None:
        self.path, self.done = path, done
        self._made_of, self._size = dict(made_of), size
        self._part = partial_folder(path)

    @classmethod
    @contextmanager
    def open(cls, path: Path, made_of: Mapping[str, str], told: Callable[[str], None]) -> Iterator[OutputFile]:
        """Hold the file's folder, and continue what is in it.

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
            yield cls._continued(path, made_of, told)
        finally:
            lock.release()

    @classmethod
    def _continued(cls, path: Path, made_of: Mapping[str, str], told: Callable[[str], None]) -> OutputFile:
        part = partial_folder(path)
        if not (part / _STATE).is_file():
            new = cls(path, made_of)
            (part / _LINES).write_bytes(b"")
            new._note()
            return new
        try:
            state = load_json(part / _STATE, most=_MOST)
            problem = odd(state, _SHAPE)
        except (OSError, ValueError) as error:
            state, problem = {}, str(error)
        if problem or (part / _LINES).stat().st_size < state["bytes"]:
            raise ConfigError(f"--out: {part} is damaged{f': {problem}' if problem else ''}; remove it to begin anew.")
        for name, value in made_of.items() if state["records"] else ():
            if state["made_of"].get(name) != value:
                raise ConfigError(
                    f"--out: {part} was begun with another {name}. Repeat that command, or remove the folder to begin "
                    "anew."
                )
        os.truncate(part / _LINES, state["bytes"])
        if state["records"]:
            told(f"Continuing {path} after {state['records']:,} records.")
        return cls(path, made_of, state["records"], state["bytes"])

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write some more; they are on disk when this returns.

        Raises:
            DiskError: the disk refuses; what was there before stays.
        """
        text = "".join(f"{dumps(line)}\n" for line in lines).encode()
        with disk_errors(self._part), (self._part / _LINES).open("r+b") as out:
            out.seek(self._size)
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        self._size += len(text)
        self.done += text.count(b"\n")
        self._note()

    def finish(self) -> None:
        """Give the file its name."""
        with disk_errors(self.path):
            (self._part / _LINES).replace(self.path)
        shutil.rmtree(self._part, ignore_errors=True)

    def _note(self) -> None:
        with disk_errors(self._part):
            write_json(self._part / _STATE, {"made_of": self._made_of, "records": self.done, "bytes": self._size})


def partial_folder(path: Path) -> Path:
    """The folder of what is not finished."""
    return path.with_name(f"{path.name}.partial")

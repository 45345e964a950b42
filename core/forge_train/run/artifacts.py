"""Files that a run produced besides its records: path, size, hash and author of each, kept in the run's folder."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from ..base.strict_json import dumps

log = logging.getLogger("forge_train")

FOLDER = Path("artifacts") / ".recorded"
"""In a run's folder: a file for each rank, so that ranks on several nodes write apart, and one for exports."""


@dataclass(frozen=True)
class Artifact:
    """A file that was recorded."""

    path: str
    """Below the run's folder; absolute if it lies elsewhere."""
    bytes: int
    sha256: str
    plugin: str
    """Its author: a plugin, or the command that wrote it."""


class Recorder:
    """Records files of one process. They are read in a thread of its own.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread: ThreadPoolExecutor | None = None
        self._files: list[Path] = []

    @property
    def files(self) -> Sequence[Path]:
        """Files that this process has recorded, or is about to record, in order."""
        return tuple(self._files)

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
        self._thread = self._thread or ThreadPoolExecutor(1, "artifacts")
        for file in files:
            self._files.append(file)
            self._thread.submit(self._write, file, plugin, where)

    def settle(self) -> None:
        """Wait until everything is recorded."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _write(self, file: Path, plugin: str, where: str) -> None:
        try:
            with file.open("rb") as data:
                sha256 = hashlib.file_digest(data, "sha256").hexdigest()
                size = os.fstat(data.fileno()).st_size
            own = file.absolute()
            inside = own.is_relative_to(self._folder.absolute())
            path = own.relative_to(self._folder.absolute()) if inside else own
            into = self._folder / FOLDER / f"{where}.jsonl"
            into.parent.mkdir(parents=True, exist_ok=True)
            with into.open("a", encoding="utf-8") as out:
                out.write(dumps(asdict(Artifact(path.as_posix(), size, sha256, plugin))) + "\n")
        except OSError as error:
            if self._folder.exists():  # else the run was a trial, and is over
                log.warning("%s is not recorded: %s", file, error.strerror or error)

"""Files that a run has left, recorded with size, hash and author."""

from __future__ import annotations

import hashlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from forge_train.base.strict_json import dumps
from forge_train.run import run

log = logging.getLogger("forge_train")

RECORDED = Path("artifacts") / ".recorded"
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


class Recorder(run.Recorder):
    """Records size and hash of files, which are read in a thread of its own.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._thread: ThreadPoolExecutor | None = None

    def record(self, path: Path, plugin: str, where: str) -> None:
        known = len(self.files)
        super().record(path, plugin, where)
        self._thread = self._thread or ThreadPoolExecutor(1, "artifacts")
        for file in self.files[known:]:
            self._thread.submit(self._write, file, plugin, where)

    def settle(self) -> None:
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
            into = self._folder / RECORDED / f"{where}.jsonl"
            into.parent.mkdir(parents=True, exist_ok=True)
            with into.open("a", encoding="utf-8") as out:
                out.write(dumps(asdict(Artifact(path.as_posix(), size, sha256, plugin))) + "\n")
        except OSError as error:
            if self._folder.exists():  # else the run was a trial, and is over
                log.warning("%s is not recorded: %s", file, error.strerror or error)

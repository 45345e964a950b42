"""A disk that is full for the files of some name: no mount and no right is needed to have one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


class _Full:
    """A file that takes nothing."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def writelines(self, lines: Any) -> None:
        self.write(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@contextmanager
def full_for(*endings: str, below: str = "") -> Iterator[None]:
    """Refuse what is written to files whose names end so, in folders whose path has `below` in it."""
    real = Path.open

    def opened(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = real(self, mode, *arguments, **options)
        name = self.name.removesuffix(".partial")
        wanted = below in str(self.parent) and name.endswith(endings)
        return _Full(file) if wanted and mode.strip("bt") != "r" else file

    real_pwrite = os.pwrite

    def pwritten(handle: int, data: Any, offset: int) -> int:
        file = Path(f"/proc/self/fd/{handle}").readlink()
        if below in str(file.parent) and file.name.endswith(endings):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_pwrite(handle, data, offset)

    def copied(source: Path, target: Path) -> None:
        with opened(Path(target), "wb") as out:
            out.write(Path(source).read_bytes())

    with patch.object(Path, "open", opened), patch("shutil.copyfile", copied), patch("os.pwrite", pwritten):
        yield


def refused(
    folder: str, ending: str, rank: int = 0, below: str = ".partial", plugins: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Train until the first save, for which a rank has no room, and say how that ended."""
    import torch.distributed as dist

    from forge_train.base.files import DiskError
    from forge_train_tools.testing import run_forge

    config = {"train.global_batch": 12, "train.micro_batch": 1, "checkpoint.every": 1}
    config |= {"checkpoint.format": "safetensors"} if "-of-" in ending or "model" in ending else {}
    with full_for(*((ending,) if dist.get_rank() == rank else ()), below=below):
        try:
            run_forge(plugins, config, steps=2, name="run", folder=Path(folder))
        except DiskError as error:
            return {"error": str(error)}
    return {"error": ""}

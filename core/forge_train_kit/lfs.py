"""Pointers of Git LFS, which stand for files that were not fetched."""

from __future__ import annotations

from pathlib import Path

from forge_train.base.errors import ConfigError


def check_pointer(file: Path) -> None:
    """Raises ConfigError for a file that is a pointer of Git LFS; whoever reads another one says what is wrong."""
    if not file.is_file():
        return
    try:
        with file.open("rb") as opened:
            why = pointer(opened.read(64))
    except OSError:
        return
    if why:
        raise ConfigError(f"{file}: {why}")


def pointer(content: bytes) -> str:
    """The reason to refuse a file that is a pointer of Git LFS; empty for another file."""
    if not content.startswith(b"version https://git-lfs"):
        return ""
    return "is a pointer of Git LFS, not the file itself; run git lfs pull in its repository."

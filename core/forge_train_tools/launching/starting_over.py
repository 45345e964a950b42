"""A run that has no checkpoint starts over in its folder; what it left is kept there."""

from __future__ import annotations

import logging
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError, describe
from forge_train.base.files import remove_remains
from forge_train.config import differences
from forge_train.loop.describe import to_toml
from forge_train.plugin.job import Job
from forge_train.run.run import MAKE_A_RUN, MODEL_FILES, Run, writing

log = logging.getLogger("forge_train")


def start_over(job: Job) -> None:
    """Keep what a run without a checkpoint left, so that it starts over in an empty folder."""
    changes = changed_values(job.run.dir / "config.toml", to_toml(job.config, job.hooks))
    log.warning(
        "%s has no whole checkpoint, so the run starts over. What was there is kept in %s.%s",
        job.run.dir,
        set_aside(job.run).name,
        "\n  ".join(["\nThe values are not the same:", *changes]) if changes else "",
    )


def set_aside(run: Run) -> Path:
    """Move what an earlier attempt left into `attempt-N/`, so that the run starts over in an empty folder.

    Raises:
        ConfigError: if it can't be written.
    """
    numbers = (found[1] for path in run.dir.iterdir() if (found := _ATTEMPT.match(path.name)))
    aside = run.dir / f"attempt-{1 + max(map(int, numbers), default=0)}"
    with writing(run.dir):
        aside.mkdir()
        for name in MAKE_A_RUN:  # which the folder stays, also if this process is killed
            shutil.copyfile(run.dir / name, aside / name)
        if (files := run.dir / MODEL_FILES).is_dir():  # the configuration may name some
            shutil.copytree(files, aside / MODEL_FILES)
        remove_remains(run.checkpoints)
        for path in sorted(run.dir.iterdir()):
            if not _stays(path.name):
                path.rename(aside / path.name)
        run.checkpoints.mkdir()
    return aside


_ATTEMPT = re.compile(r"attempt-(\d+)$")


def _stays(name: str) -> bool:
    """Return True if an entry of a run's folder is not moved: the open log, the lock, and files that are rewritten."""
    kept = ("log", MODEL_FILES, *MAKE_A_RUN)
    return name in kept or name.startswith(".") or _ATTEMPT.match(name) is not None


def changed_values(file: Path, text: str) -> list[str]:
    """`train.steps: 4 then, 8 now` for every value that differs between a run's config.toml and a new one.

    Raises:
        ConfigError: if the file can't be read.
    """
    try:
        before = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # which editors of Windows write
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: can't read the run's configuration: {describe(error)}.") from error
    old, new = dict(_flat(before)), dict(_flat(tomllib.loads(text)))
    return [f"{key}: {then!r} then, {now!r} now" for key, then, now in differences(old, new)]


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

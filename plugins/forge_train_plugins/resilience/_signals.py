"""End of this process's job, according to Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping

PATIENCE = 20.0
"""Seconds that `squeue` may take to answer."""
_LEFT = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")


def end_of_job(environment: Mapping[str, str] = os.environ) -> float | None:
    """The time at which Slurm ends this job, in seconds since the epoch; None outside Slurm, or without a limit.

    `SLURM_JOB_END_TIME` says so since Slurm 22.05; an older one is asked with `squeue -o %L`.
    """
    if told := environment.get("SLURM_JOB_END_TIME"):
        return float(told) if told.isdigit() else None
    number = environment.get("SLURM_JOB_ID")
    if not number:
        return None
    try:
        asked = subprocess.run(
            ["squeue", "-h", "-j", number, "-o", "%L"], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    left = seconds_left(asked.stdout)
    return None if left is None else time.time() + left


def seconds_left(text: str) -> float | None:
    """Seconds in what `squeue` writes as the time left: `days-hours:minutes:seconds`, or a word such as UNLIMITED."""
    match = _LEFT.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds

"""Stacks of this process's threads, and its latest collectives."""

from __future__ import annotations

import faulthandler
import linecache
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from forge_train.base.strict_json import dumps, loads

INNER = 3
"""Frames of the main thread, from the innermost, that tell whether it waits for other ranks."""
_WAITS = re.compile(r"\.wait\(|wait_tensor|\.synchronize\(")
_OF_TORCH = re.compile(r"[/\\]torch[/\\]")
_OF_PYTHON = re.compile(rf"<frozen |{re.escape(sysconfig.get_path('stdlib'))}[/\\](?!site-packages[/\\])")


@dataclass(frozen=True)
class Place:
    """Place of a main thread."""

    at: str
    """`file:line, in function`, of code that is neither torch's nor Python's own."""
    awaits: str
    """The collective that it waits in; empty where it is busy with something of its own."""


def place(thread: int | None = None) -> Place:
    """Return the place of a thread, by default the main one."""
    frames = list(_frames(thread or threading.main_thread().ident or 0))
    own = next((frame for frame in frames if is_own(frame.f_code.co_filename)), None)
    return Place(_words(own) if own else "", _awaited(frames[:INNER]))


def dump(file: Path) -> None:
    """Write the stacks of all threads."""
    with file.open("w", encoding="utf-8") as out:
        faulthandler.dump_traceback(out, all_threads=True)


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the contents of torch's flight recorders, in order: the last TORCH_FR_BUFFER_SIZE collectives.

    NCCL's process groups have a recorder of their own, which the one of all others knows nothing of (torch 2.13).
    """
    torchs = sys.modules.get("torch._C._distributed_c10d")
    recorders = (getattr(torchs, f"_dump_{kind}_trace_json", None) for kind in ("nccl", "fr"))
    entries = [entry for record in recorders if record for entry in loads(record()).get("entries", [])]
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def dump_collectives(file: Path) -> str:
    """Write the recorded collectives, the last first; that one in words, if there is one."""
    if "torch.distributed" not in sys.modules:
        return ""
    entries = recorded_collectives()[::-1]
    file.write_text(dumps(entries, indent=1) + "\n", encoding="utf-8")
    if not entries:
        return ""
    last = entries[0]
    name, number = last.get("profiling_name", "a collective"), last.get("collective_seq_id", "?")
    return f"{name} number {number} of group {(last.get('process_group') or ['?'])[0]}"


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_own(file: str) -> bool:
    """Return True for the file of code that is neither torch's nor Python's own."""
    return not _OF_TORCH.search(file) and not _OF_PYTHON.match(file)


def _words(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _awaited(frames: list[FrameType]) -> str:
    """The outermost of the innermost frames that belong to torch.distributed is the collective that was called."""
    within = [frame for frame in frames if "/torch/distributed/" in frame.f_code.co_filename.replace("\\", "/")]
    if within:
        named = [frame.f_code.co_name for frame in within if frame.f_code.co_name != "wrapper"]
        return named[-1] if named else within[-1].f_code.co_name
    if frames:
        line = linecache.getline(frames[0].f_code.co_filename, frames[0].f_lineno)
        if "/threading.py" not in frames[0].f_code.co_filename and _WAITS.search(line):
            return frames[0].f_code.co_name
    return ""

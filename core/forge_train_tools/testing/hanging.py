"""State of ranks of a pool that hang: their stacks, in Python and in C++, and their last collectives."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

LAST_FRAME = "_run_module_as_main"
"""Ends the stack of the main thread, which faulthandler writes last."""
LAST_COLLECTIVE = "Those were its last collectives."
"""Follows the collectives, which a thread of Python writes: it never does where another one keeps the GIL."""
LAST = 10
"""Collectives that are shown; of those before, only the ones that are not finished."""
INTERPRETER = re.compile(r"_?Py[A-Z_]|cfunction_|method_vectorcall|do_call_core|\?\?")
"""Frames that say nothing: the stacks in Python do."""
WIDTH = 100
"""Characters of a function's name and types that are shown."""
GLANCE = 1.0
"""Seconds between two looks at a clock of processes."""
DEBUGGER = "gdb"
PATIENCE = 30.0
"""Seconds that the debugger may take."""


class Clock:
    """Seconds that go by for processes, without those in which one waits for a core: where many share few, work takes
    long, and nothing hangs. Outside Linux, all seconds.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._waits = {process: _waited(process) for process in processes}
        self._lost = 0.0

    def now(self) -> float:
        waits = {process: _waited(process) for process in self._waits}
        self._lost += max(0.0, *(waits[process] - before for process, before in self._waits.items()))
        self._waits = waits
        return time.monotonic() - self._lost


def _waited(process: int) -> float:
    """Seconds for which the main thread of a process was ready to run, and had no core."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:  # it has ended, or the system doesn't say
        return 0.0


def answer_signal() -> None:
    """In a rank: at SIGUSR2, write the stacks of all threads and then the last collectives to stderr.

    faulthandler needs no thread of Python for the stacks. The collectives need one that does not hang.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.signal(signal.SIGUSR2, lambda number, frame: None)  # else its number is not written to the pipe
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=True)

    def answer() -> None:
        while number := os.read(reads, 1):
            if number[0] == signal.SIGUSR2:
                sys.stderr.write(f"{collectives()}\n{LAST_COLLECTIVE}\n")
                sys.stderr.flush()

    threading.Thread(target=answer, name="pool-answers", daemon=True).start()


def collectives() -> str:
    """The last collectives of this process, and all that are not finished, from torch's flight recorder, which keeps
    those of gloo too (torch 2.11)."""
    recorder = sys.modules.get("torch._C._distributed_c10d")
    record = getattr(recorder, "_dump_fr_trace_json", None)
    entries = json.loads(record()).get("entries", []) if record else []
    entries.sort(key=lambda entry: int(entry["record_id"]))
    shown = [entry for entry in entries[:-LAST] if not entry["retired"]] + entries[-LAST:]
    return "\n".join(
        f"  {entry['profiling_name']} {entry['collective_seq_id']} of group {entry['process_group']}: "
        + ("finished" if entry["retired"] else "not finished")
        for entry in shown
    )


def stacks(process: int) -> str:
    """The stacks in C++ of a process's threads, where there is a debugger; equal ones once."""
    debugger = shutil.which(DEBUGGER)
    if debugger is None:
        return f"Its stacks in C++ would be here if {DEBUGGER} were installed."
    command = [debugger, "--batch", "--nx", "-ex", "set pagination off", "-ex", "thread apply all backtrace 25"]
    try:
        done = subprocess.run(
            [*command, "-p", str(process)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{DEBUGGER}: {error}"
    return merged(done.stdout) or f"{DEBUGGER}: {done.stderr.strip()[-500:]}"


def merged(backtraces: str) -> str:
    """gdb's backtraces of threads, without addresses and arguments; threads of the same stack together."""
    known: Counter[str] = Counter()
    for thread in re.split(r"^Thread ", backtraces, flags=re.MULTILINE)[1:]:
        head, *frames = thread.splitlines()
        name = re.search(r'"(.*)"', head)
        known["\n".join([name[1] if name else "thread", *_functions(frames)])] += 1
    return "\n".join(f"{number} × {stack}" for stack, number in known.items())


def _functions(frames: Iterable[str]) -> Iterable[str]:
    for frame in frames:
        found = re.match(r"#\d+ +(?:0x[0-9a-f]+ in )?(.*?)(?: \((?!anonymous).*)?$", frame)
        if found and not INTERPRETER.match(found[1]):
            yield f"    {found[1][:WIDTH]}"

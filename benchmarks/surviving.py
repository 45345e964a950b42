"""What surviving costs: a killed rank until the next finished step, and the plugins that watch a run that is well.

python benchmarks/run.py surviving   # writes benchmarks/results/surviving.md
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

WATCHERS = ("watchdog", "anomaly", "health")
STEP = 0.1
"""Seconds of the step that the watchers are compared with."""
AT, EVERY, STEPS = 7, 2, 12
PLUGIN = '''
import os
import signal
import time
from pathlib import Path

from forge_train import Plugin, hookimpl


class Mourned(Plugin):
    """Rank 1 is killed in the first attempt; rank 0 notes when steps end."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job):
        self.rank, self.attempt = job.dist.rank, job.dist.place.attempt

    @hookimpl
    def on_step(self, step):
        if self.rank == 1 and self.attempt == 0 and step.step == AT:
            Path("killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == 0:
            with Path("steps").open("a") as file:
                file.write(f"{self.attempt} {time.time()!r}\\n")
'''


def restart() -> float:
    """Seconds from the kill of one of two ranks to the end of the next step, with the watchers."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mourned.py").write_text(PLUGIN.replace("AT", str(AT)), encoding="utf-8")
        settings = {
            "train.steps": STEPS,
            "train.evaluate_every": 0,
            "checkpoint.every": EVERY,
            "log.every": 1,
        }
        sets = [part for key, value in settings.items() for part in ("-s", f"{key}={value}")]
        plugins = ",".join(("./mourned.py", *WATCHERS))
        command = ["train", "quickstart", "-p", plugins, "--nproc", "2", "--max-restarts", "1", "--quiet", *sets]
        forge = Path(sys.executable).with_name("forge")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([forge, *command], cwd=folder, env=environment, check=True, stderr=subprocess.DEVNULL)
        ends = [line.split() for line in Path(folder, "steps").read_text(encoding="utf-8").splitlines()]
        killed = float(Path(folder, "killed").read_text(encoding="utf-8"))
    return min(float(at) for attempt, at in ends if attempt == "1") - killed


def watching(repeats: int = 3) -> float:
    """CPU seconds that the watchers take of a step, beside one that logs nothing; the least of several differences."""
    from forge_train import Plugin, hookimpl
    from forge_train_tools.testing import run_forge

    class Clock(Plugin):
        """Notes the CPU time at the end of each step."""

        api = (1, 0)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.ends: list[float] = []

        @hookimpl
        def on_step(self, step: Any) -> None:
            self.ends.append(time.process_time())

    def one(*plugins: Any) -> float:
        run = run_forge([Clock, *plugins], {"log.every": 50}, steps=400)
        steps = sorted(later - earlier for earlier, later in pairwise(run.plugin("clock").ends[50:]))
        return sum(steps[: len(steps) // 2]) / (len(steps) // 2)

    plain, watched = zip(*((one(), one(*WATCHERS)) for _ in range(repeats)), strict=True)
    return max(min(watched) - min(plain), 0.0)

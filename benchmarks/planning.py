"""What `forge plan` takes for models and worlds that no machine here could hold: CPU seconds, and memory.

`planned` is called by run.py and by tests/e2e/test_plan_at_scale.py; each plan is a command of its own, on one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA = {"decoder.qk_norm": "false", "decoder.kv_heads": 8, "decoder.vocabulary": 128256, "train.precision": "bf16"}
EIGHT = {
    **LLAMA,
    "decoder.dim": 4096,
    "decoder.layers": 32,
    "decoder.heads": 32,
    "decoder.hidden": 14336,
    "decoder.max_sequence": 8192,
    "train.sequence": 8192,
    "train.global_batch": 64,
    "parallel.tp": 8,
}
SEVENTY = {
    **LLAMA,
    "decoder.dim": 8192,
    "decoder.layers": 80,
    "decoder.heads": 64,
    "decoder.hidden": 28672,
    "decoder.max_sequence": 131072,
    "train.sequence": 131072,
    "train.global_batch": 512,
    "train.micro_batch": 1,
    "parallel.pp": 8,
    "parallel.tp": 8,
    "parallel.cp": 4,
}
SEVENTY_B = "70B dense, pp 8 × tp 8 × cp 4 × dp 32, 131,072 tokens"
PLANS: dict[str, tuple[int, str, dict[str, object]]] = {
    "8B dense, tp 8 × dp 64, 8,192 tokens": (512, "tp", EIGHT),
    f"{SEVENTY_B}, `ulysses`": (8192, "pp,tp,cp", {**SEVENTY, "cp.method": "ulysses"}),
    f"{SEVENTY_B}, `gather`": (8192, "pp,tp,cp", {**SEVENTY, "cp.method": "gather"}),
}
"""What is planned → ranks, plugins and configuration."""


def planned(world: int, plugins: str, config: Mapping[str, object]) -> tuple[Any, float, float]:
    """A plan as JSON, its CPU seconds, and the peak of its memory in GB."""
    sets = [argument for key, value in config.items() for argument in ("-s", f"{key}={value}")]
    command = [sys.executable, "-m", "forge_train_cli", "plan", "--world", str(world), "-p", plugins, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        # The peak of a process begins with that of the one that started it (Linux), which here may be a test session.
        ended = subprocess.run(
            [sys.executable, __file__, file, *command, "--device", "h100", *sets], stdout=subprocess.PIPE, check=True
        )
        code, seconds, peak = json.loads(ended.stdout)
        if code:
            raise RuntimeError(f"forge plan ended with {code}")
        made = json.loads(file.read_text(encoding="utf-8"))
    return made, seconds, peak / 1e9


def used(file: str, *command: str) -> tuple[int, float, int]:
    """The exit code of a command that prints into a file, its CPU seconds, and the peak of its memory in bytes."""
    out = (os.POSIX_SPAWN_OPEN, 1, file, os.O_WRONLY | os.O_CREAT, 0o600)
    process = os.posix_spawn(command[0], command, os.environ | {"OMP_NUM_THREADS": "1"}, file_actions=[out])
    _, status, usage = os.wait4(process, 0)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, peak


if __name__ == "__main__":
    print(json.dumps(used(*sys.argv[1:])))

"""`forge plan` for a model that no machine here could hold, over ranks that no machine here has."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.accept("dist", 5)]

EIGHT_BILLION = {
    "decoder.dim": 4096,
    "decoder.layers": 32,
    "decoder.heads": 32,
    "decoder.kv_heads": 8,
    "decoder.hidden": 14336,
    "decoder.vocabulary": 128256,
    "decoder.max_sequence": 8192,
    "decoder.qk_norm": "false",
    "train.sequence": 8192,
    "train.global_batch": 64,
    "train.precision": "bf16",
    "parallel.tp": 8,
}
WEIGHTS = 8_030_261_248
"""Of Llama 3 8B."""


def test_eight_billion_parameters_on_512_ranks(tmp_path: Path) -> None:
    """At most 60 seconds of one core, and 2 GB."""
    sets = [argument for key, value in EIGHT_BILLION.items() for argument in ("-s", f"{key}={value}")]
    command = [sys.executable, "-m", "forge_train_cli", "plan", "--world", "512", "-p", "tp", "--device", "h100"]
    out = tmp_path / "plan.json"
    process = os.posix_spawn(
        sys.executable,
        [*command, "--json", *sets],
        os.environ | {"OMP_NUM_THREADS": "1"},
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, str(out), os.O_WRONLY | os.O_CREAT, 0o600)],
    )
    _, status, usage = os.wait4(process, 0)
    seconds, unit = usage.ru_utime + usage.ru_stime, 1 if sys.platform == "darwin" else 1024
    print(f"{seconds:.1f} s, {usage.ru_maxrss * unit / 1e9:.2f} GB")
    assert os.waitstatus_to_exitcode(status) == 0
    assert seconds <= 60
    assert usage.ru_maxrss * unit <= 2e9
    plan = json.loads(out.read_text(encoding="utf-8"))
    memory, parameters = plan["memory"], plan["parameters"]
    assert parameters["total"] == WEIGHTS
    assert WEIGHTS / 512 <= parameters["held"] <= 1.001 * WEIGHTS / 512
    assert memory["parameters"] == memory["gradients"] == 4 * parameters["held"]
    assert 2 * memory["parameters"] <= memory["optimizer"] <= 2 * memory["parameters"] + 4 * 1000
    assert memory["notes"] == []
    # 34 bytes a token, feature and layer, an eighth of them on each rank (arXiv:2205.05198, table 2, without scores),
    # and two gathered inputs, which are kept here; SwiGLU keeps more than GELU does, and norms keep fp32.
    assert 1 < memory["activations"] / ((34 / 8 + 2 * 2) * 8192 * 4096 * 32) < 2
    assert (plan["nodes"], plan["crossing"], plan["warnings"]) == (64, ["dp_shard"], [])
    for axis, least in plan["expected_bytes"].items():
        assert sum(one["bytes"] for one in plan["communication"] if one["axis"] == axis) <= 1.05 * least
    assert plan["flops_per_token"] == pytest.approx(6 * (WEIGHTS - 128256 * 4096) + 6 * 32 * 4096 * 8192, rel=0.01)
    assert plan["roofline"]["fits"] is True

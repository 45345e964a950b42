"""`forge bench` measures, and leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_command import Forge
from forge_train_tools.bench import cpu_seconds, measure
from forge_train_tools.configuration.request import Request


@pytest.mark.slow
def test_bench(forge: Forge, folder: Path) -> None:
    before = {path for path in folder.iterdir() if path.name != "__pycache__"}
    found = forge(
        "bench", "tiny.toml", "-s", "checkpoint.mirror=nowhere://b", "--turns", "2", "--json"
    ).json  # not filled
    assert found["tokens_per_second"] > 0
    assert (found["clock"], found["mfu"]) == ("CPU", None)
    assert 0.2 < found["loop_speed"] < 2
    assert found["data_tokens_per_second"] > found["tokens_per_second"]
    assert found["save_seconds"] > 0
    assert found["load_seconds"] > 0
    assert found["checkpoint_bytes"] > 0
    assert 0 < found["share_of_matmul"] < 1
    assert set(found["start_up"]) == {"forge --version", "forge --help", "forge plugins list"}
    assert {path for path in folder.iterdir() if path.name != "__pycache__"} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tiny.toml", "--turns", "0"], "--turns"),
        (["tiny.toml", "-p", "nope"], "no plugin named 'nope'"),
        (["nope"], "no preset 'nope'"),
        (["tiny.toml", "-s", "train.init_from=nowhere"], "nowhere: there is no such run or checkpoint"),
    ],
)
def test_mistakes(forge: Forge, arguments: list[str], says: str) -> None:
    assert says in forge("bench", *arguments, fails=2).err


def test_cpu_seconds_are_finer_than_a_clock_tick() -> None:
    import sys

    assert 0 < cpu_seconds([sys.executable, "-c", "pass"], 2) < 5


@pytest.mark.slow
def test_a_schedule_may_be_longer_than_the_measurement(forge: Forge) -> None:
    """The presets of published models warm up for thousands of steps."""
    found = forge("bench", "tiny.toml", "-s", "cosine.warmup=8000", "-s", "log.peak_tflops=1", "--turns", "1", "--json")
    assert found.json["tokens_per_second"] > 0
    assert 0 < found.json["mfu"] < 1


@pytest.mark.slow
def test_the_loop_by_hand_trains_what_a_plugin_makes_of_batches() -> None:
    """Multi-token prediction has labels from `prepare_batch`, and hears of each micro-batch."""
    small = ("decoder.dim=16", "decoder.layers=1", "train.global_batch=2", "train.sequence=32", "run.device=cpu")
    found = measure(Request(config="quickstart", plugins=("mtp",), set=small), turns=1)
    assert found.speed > 0


def test_a_device_is_measured_by_the_wall_and_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU seconds do not count what a device does, and a product of 1,024³ takes it no longer than its launch."""
    import torch

    from forge_train_tools import bench

    assert bench.clock_of(torch.device("cpu")) is time.process_time
    assert bench.clock_of(torch.device("cuda")) is time.perf_counter
    drawn: list[int] = []

    def randn(rows: int, columns: int, device: torch.device) -> torch.Tensor:
        drawn.append(rows)
        return torch.ones(2, 2)

    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for kind in ("cpu", "cuda"):
        job: Any = SimpleNamespace(device=torch.device(kind), precision=SimpleNamespace(compute=torch.bfloat16))
        assert bench.matmul_speed(job, seconds=0.01) > 0
    assert drawn == [1024, 8192]

"""`forge bench` measures, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_command import Forge
from forge_train_tools.bench import cpu_seconds


@pytest.mark.slow
def test_bench(forge: Forge, folder: Path) -> None:
    before = {path for path in folder.iterdir() if path.name != "__pycache__"}
    found = forge(
        "bench", "tiny.toml", "-s", "checkpoint.mirror=nowhere://b", "--turns", "2", "--json"
    ).json  # not filled
    assert found["tokens_per_second"] > 0
    assert 0.2 < found["loop_speed"] < 2
    assert found["data_tokens_per_second"] > found["tokens_per_second"]
    assert found["save_seconds"] > 0
    assert found["load_seconds"] > 0
    assert found["checkpoint_bytes"] > 0
    assert 0 < found["share_of_matmul"] < 1
    assert set(found["start_up"]) == {"forge --version", "forge --help", "forge plugins list"}
    assert {path for path in folder.iterdir() if path.name != "__pycache__"} == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tiny.toml", "--turns", "0"], "--turns"),
        (["tiny.toml", "-p", "nope"], "no plugin named 'nope'"),
        (["nope"], "no preset 'nope'"),
    ],
)
def test_mistakes(forge: Forge, arguments: list[str], says: str) -> None:
    assert says in forge("bench", *arguments, fails=2).err


def test_cpu_seconds_are_finer_than_a_clock_tick() -> None:
    import sys

    assert 0 < cpu_seconds([sys.executable, "-c", "pass"], 2) < 5

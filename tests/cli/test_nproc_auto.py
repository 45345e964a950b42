"""`--nproc auto`: one process for each CUDA device, without being asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_command import Forge
from forge_train_tools.launching import devices, training
from forge_train_tools.launching.launch import Ended, WorkerResult
from forge_train_tools.launching.training import Launched
from packages import package


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How many processes were started, instead of starting them."""
    counts: list[int] = []

    def start(*arguments: Any, nproc: int, **more: Any) -> Launched:
        counts.append(nproc)
        result = {"step": 1, "loss": 1.0, "outcome": "done", "reason": "", "closing": []}
        return Launched(tmp_path, Ended([WorkerResult(0, 0, result=result)]))

    monkeypatch.setattr(training, "train_several", start)
    return counts


@pytest.mark.parametrize(
    ("options", "found", "count"),
    [
        ([], 2, 2),
        (["--nproc", "auto"], 2, 2),
        (["-s", "parallel.dp_shard=1", "-s", "parallel.dp_replicate=2"], 8, 2),
        (["--nproc", "2"], 8, 2),
    ],
)
def test_a_process_for_each_device(
    forge: Forge, started: list[int], monkeypatch: pytest.MonkeyPatch, options: list[str], found: int, count: int
) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda: found)
    forge("train", "tiny.toml", "-s", "train.micro_batch=1", *options, "-q")
    assert started == [count]


def test_an_axis_of_a_package_multiplies_the_processes(
    forge: Forge, started: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    declared = "from forge_train import Axis\nPODS = Axis('pods', splits_data=True, averages=True)"
    package(tmp_path / "site", "padded", {"axes.py": declared}, {"axes": {"pods": "padded.axes:PODS"}})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(devices, "cuda_devices", lambda: 8)
    axes = ("-s", "parallel.pods=2", "-s", "parallel.dp_shard=1", "-s", "parallel.dp_replicate=2")
    forge("train", "tiny.toml", "-s", "train.micro_batch=1", "-s", "train.global_batch=4", *axes, "-q")
    assert started == [4]


@pytest.mark.parametrize(
    ("options", "found"),
    [([], 0), ([], 1), (["-s", "run.device=cpu"], 8), (["--nproc", "1", "-s", "run.device=cpu"], 8)],
)
def test_one_process(
    forge: Forge, started: list[int], monkeypatch: pytest.MonkeyPatch, options: list[str], found: int
) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda: found)
    said = forge("train", "tiny.toml", "-s", "train.steps=1", *options).out
    assert started == []
    assert " · cpu · 1 process · " in said


def test_a_layout_that_does_not_fit_names_the_way_out(
    forge: Forge, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda: 3)
    said = forge("train", "tiny.toml", fails=2).err
    assert "(--nproc auto starts 3 processes here; --nproc 1 starts one.)" in said


def test_torch_counts_only_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def count() -> int:
        raise AssertionError("there is no driver")

    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(devices, "DRIVERS", ("no-such-driver*",))
    assert devices.cuda_devices() == 0
    monkeypatch.setattr(devices, "DRIVERS", ("null",))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert devices.cuda_devices() == 4

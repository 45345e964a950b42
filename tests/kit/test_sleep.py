"""Weights, gradients, optimizer state and batches that leave memory, and come back."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sleepers
from forge_train import ForgeError, Model
from forge_train_kit import sleep
from forge_train_kit.sleep import TAGS, asleep
from forge_train_tools.testing import RunForge, TinyRun

pytestmark = pytest.mark.unit

BIG = {"decoder.hidden": 256, "checkpoint.every": 1, "checkpoint.asynchronous": True}


def equal(one: TinyRun, other: TinyRun) -> bool:
    pairs = zip(one.model.named_parameters(), other.model.named_parameters(), strict=True)
    return one.numbers == other.numbers and all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_a_run_that_sleeps_is_the_run_that_does_not(run_forge: RunForge, tmp_path: Path) -> None:
    """To the bit, with gradients of one micro-batch kept and checkpoints in flight, and at the same addresses."""
    awake = run_forge((), BIG, name="awake")
    slept = run_forge((sleepers.Sleeper,), {**BIG, "sleeper.folder": str(tmp_path)}, name="slept")
    assert equal(awake, slept)
    own = sum(one.nbytes for one in slept.model.parameters())
    assert max(slept.plugin("sleeper").bytes) > 3 * own, "weights, gradients and two moments, but for parts of pages"
    for step in (2, 3):
        files = [next(one.run.glob(f"checkpoints/step-{step:08}/*.safetensors")) for one in (awake, slept)]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert {one.name for one in tmp_path.iterdir()} == {"runs"}


@pytest.mark.parametrize("stored", ["memory", "disk"])
def test_memory_of_another_device_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
    """Such memory is not given back by pages: a storage is emptied, and its tensors stay the objects that they are."""
    monkeypatch.setattr(sleep, "_pages", lambda storage: None)
    part = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    part[1].weight = part[0].weight
    model, weight, view = Model([part]), part[0].weight, part[0].weight.detach()[1:]
    optimizer = torch.optim.AdamW(part.parameters())
    part(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    expected, expected_gradient = weight.detach().clone(), torch.as_tensor(weight.grad).clone()
    elsewhere: Any = SimpleNamespace(
        device=SimpleNamespace(type="elsewhere"), models={}, step=SimpleNamespace(batches=())
    )
    with asleep(elsewhere, model, optimizer, folder=tmp_path if stored == "disk" else None) as sleeping:
        assert sleeping.bytes == 4 * 4 * (9 + 3 + 3) + 4 * 3, "also the steps of three parameters"
        empty = [one.untyped_storage().nbytes() for one in (weight, view)]  # printing such a tensor would crash
        assert empty == [0, 0]
        sleeping.wake("gradients")
        gradient = weight.grad
        assert torch.equal(torch.as_tensor(gradient), expected_gradient)
        assert sleeping.tags == {"weights", "optimizer"}
    assert part[1].weight is weight
    assert torch.equal(weight, expected)
    assert torch.equal(view, expected[1:])


def test_torch_calls_all_memory_of_another_device_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    part = torch.nn.Linear(3, 3)
    here: Any = SimpleNamespace(models={}, step=SimpleNamespace(batches=()))
    monkeypatch.setattr(torch.UntypedStorage, "device", torch.device("cuda"), raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "is_shared", lambda _: True)
    found = sleep._storages(here, Model([part]), None, {"weights"})
    assert sum(one.nbytes() for one, _ in found) == 4 * (9 + 3)


@pytest.mark.slow
def test_memory_leaves_and_comes_back(tmp_path: Path) -> None:
    """Within 1 % of what the process had before, and a thousand times alike."""
    code = f"""
import pathlib, torch
from types import SimpleNamespace
from forge_train_kit.sleep import asleep
from forge_train.contract.model import Model
def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * {os.sysconf("SC_PAGE_SIZE")}
job = SimpleNamespace(device=torch.device("cpu"), models={{}}, step=SimpleNamespace(batches=()))
def made(size):
    part = torch.nn.Linear(size, size)
    optimizer = torch.optim.AdamW(part.parameters())
    part(torch.ones(2, size)).sum().backward()
    optimizer.step()
    return Model([part]), optimizer
def nap(model, optimizer):
    with asleep(job, model, optimizer, folder=pathlib.Path({str(tmp_path)!r})):
        return resident()
small = made(256)
nap(*small)
base = resident()
model, optimizer = made(2500)
full = resident()
low = nap(model, optimizer)
print(base, full, low, resident())
for turn in range(1000):
    nap(*small)
    if turn == 10: early = resident()
print(early, resident())
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    (base, full, low, back), (early, late) = (map(int, line.split()) for line in told.splitlines())
    assert full - base > 90e6
    assert low < base * 1.01
    assert abs(back - full) < 0.01 * full
    assert late < early * 1.01


@pytest.fixture
def run(run_forge: RunForge) -> TinyRun:
    return run_forge((), BIG, steps=1)


def tensors(run: TinyRun) -> list[torch.Tensor]:
    states = [one for state in run.optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    return [one.detach().clone() for one in (*run.model.parameters(), *states)]


def test_what_is_away_can_not_be_used(run: TinyRun, tmp_path: Path) -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    part = run.model.parts[0]
    with asleep(run.job, run.model, run.optimizer, folder=tmp_path) as sleeping:
        with pytest.raises(ForgeError, match=r"asleep: the forward pass needs weights; wake them first"):
            part(ids)
        with pytest.raises(ForgeError, match=r"asleep: the optimizer's step needs .*optimizer.*; wake them first"):
            run.optimizer.step()
        sleeping.wake("weights")
        with torch.no_grad():
            part(ids)
    part(ids)
    with asleep(run.job, run.model, tags=["gradients"], folder=tmp_path):
        next(run.model.parameters()).grad = torch.ones_like(next(run.model.parameters()))
    with asleep(run.job, run.model, tags=["gradients"], folder=tmp_path) as sleeping:
        assert sleeping.tags == {"gradients"}
        with pytest.raises(ForgeError, match="the forward pass needs gradients; wake"):
            part(ids)
        with torch.no_grad():
            part(ids)


def test_mistakes_lose_nothing(run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tensors(run)
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"tags": ["weight"]},
            r"'weight' is no tag of what can sleep; those are weights, gradients, optimizer, … 1 more",
        ),
        ({}, "asleep: these tensors are in host memory already; name a folder on a disk"),
        ({"folder": tmp_path / "none"}, "none: No such file or directory; tensors can't be put there"),
    ]
    for settings, says in cases:
        with pytest.raises(ForgeError, match=says), asleep(run.job, run.model, run.optimizer, **settings):
            pass
    write, written = os.write, []

    def full(file: int, data: Any) -> int:
        written.append(len(data))
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    with (
        pytest.raises(ForgeError, match="No space left on device; tensors can't be put there"),
        asleep(run.job, run.model, run.optimizer, folder=tmp_path),
    ):
        pass
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(KeyError), asleep(run.job, run.model, run.optimizer, TAGS, tmp_path):
        raise KeyError
    assert all(map(torch.equal, before, tensors(run)))


def test_other_bytes_are_told(run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv

    def broken(file: int, parts: Any, at: int) -> int:
        count = read(file, parts, at)
        parts[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", broken)
    with (
        pytest.raises(ForgeError, match="gives back other bytes than it got"),
        asleep(run.job, run.model, folder=tmp_path),
    ):
        pass

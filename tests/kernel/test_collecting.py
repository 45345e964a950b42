"""Garbage collections while a run steps on a device, and how its memory is laid out."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from forge_train.mesh import distributed
from forge_train.mesh import process_group as meter
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout

pytestmark = pytest.mark.unit


def collections(monkeypatch: pytest.MonkeyPatch, steps: int, *, active: bool) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    with monkeypatch.context() as patch, meter.scheduled_collections(active=active):
        patch.setattr(gc, "collect", lambda *generation: seen.append(generation))
        assert gc.isenabled() is not active
        for step in range(1, steps + 1):
            meter.collect(step)
    assert gc.isenabled()
    return seen


@pytest.mark.slow
def test_a_device_has_collections_at_fixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = collections(monkeypatch, 1000, active=True)
    assert seen == [(1,)] * 19 + [()]  # the last one of everything
    assert collections(monkeypatch, 1000, active=False) == []


@pytest.mark.slow
def test_an_error_gives_collections_back() -> None:
    with pytest.raises(ValueError, match="a step"), meter.scheduled_collections(active=True):
        raise ValueError("a step")
    assert gc.isenabled()


@pytest.mark.parametrize("given", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv(given, "max_split_size_mb:512")
    when: list[str] = []
    monkeypatch.setattr(distributed, "choose_device", lambda *wanted: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: when.append(os.environ.get("PYTORCH_ALLOC_CONF", "")))
    with DistributedContext.join(Layout(), "cuda"):
        pass
    wanted = {"": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}
    assert when == [wanted.get(given, "")]

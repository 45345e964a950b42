"""`auto` takes the fastest kernel that can, remembers what it measured, and keeps a run's kernel."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train import ConfigError, Plugin, hookimpl
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_plugins.attention._auto import measure as measuring
from forge_train_plugins.attention.auto import Auto
from forge_train_tools.testing import RunForge

pytestmark = [pytest.mark.unit]

Times = dict[str, float]
NAMES = {"_sdpa": "sdpa", "_flex": "flex", "kernel": "varlen", "tiled": "flex", "_eager": "eager"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> tuple[Times, list[str]]:
    """What each kernel is said to take, and those that were measured."""
    times: Times = {"sdpa": 2.0, "varlen": 1.0, "flex": 3.0}
    measured: list[str] = []

    def measure(kernel: Any, shape: Any, best: float) -> float:
        name = NAMES[type(kernel).__module__.rpartition(".")[2]]
        measured.append(name)
        return times[name]

    monkeypatch.setattr(measuring, "measure", measure)
    return times, measured


def taken(run: Any) -> str:
    return run.job.hooks.plugins["auto"].state_dict()["kernel"]  # type: ignore[no-any-return]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "forge_train")
    logging.getLogger("forge_train").propagate = True
    return lambda: [record.getMessage() for record in caplog.records if record.getMessage().startswith("auto: ")]


def test_the_fastest_is_taken_and_said_with_the_reason(
    run_forge: RunForge, clock: tuple[Times, list[str]], said: Callable[[], list[str]], tmp_path: Path
) -> None:
    settings = {"auto.cache": str(tmp_path / "cache")}
    run = run_forge([Auto], settings)
    assert taken(run) == "varlen"
    (line,) = said()
    assert line.startswith("auto: attention by varlen: varlen 1e+03 ms, sdpa 2e+03 ms, flex 3e+03 ms for ")
    assert line.endswith("features (measured now)")
    assert clock[1] == ["sdpa", "varlen", "flex"]  # flash is not installed, and eager is for where nothing else can
    assert taken(run_forge([Auto], settings)) == "varlen"
    assert len(clock[1]) == 3
    assert "measured before, " in said()[1]


def test_another_shape_is_measured_apart(run_forge: RunForge, clock: tuple[Times, list[str]], tmp_path: Path) -> None:
    settings = {"auto.cache": str(tmp_path / "cache")}
    run_forge([Auto], settings)
    clock[0]["sdpa"] = 0.5
    assert taken(run_forge([Auto], {**settings, "train.sequence": 24})) == "sdpa"
    assert taken(run_forge([Auto], settings)) == "varlen"


DAMAGED = """
{
[]
null
{"sdpa": 1}
{"sdpa": "x", "varlen": 1, "flex": 1}
{"sdpa": -1, "varlen": 1, "flex": 1}
{"sdpa": NaN, "varlen": 1, "flex": 1}
{"sdpa": null, "varlen": null, "flex": null}
\udcff"""


@pytest.mark.slow
@pytest.mark.parametrize("text", DAMAGED.split("\n"))
def test_a_damaged_file_is_measured_anew(
    text: str, run_forge: RunForge, clock: tuple[Times, list[str]], tmp_path: Path
) -> None:
    settings = {"auto.cache": str(tmp_path / "cache")}
    run_forge([Auto], settings)
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert taken(run_forge([Auto], settings)) == "varlen"
    assert len(clock[1]) == 6
    assert json.loads(file.read_text()) == {"sdpa": 2.0, "varlen": 1.0, "flex": 3.0}


def test_a_folder_that_can_not_be_written_only_costs_the_measurement(
    run_forge: RunForge, clock: tuple[Times, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    assert taken(run_forge([Auto], {"auto.cache": str(tmp_path / "file" / "cache")})) == "varlen"


def test_a_cache_that_is_a_file_is_refused(run_forge: RunForge, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"auto\.cache.* must be a folder; .*/file is a file\."):
        run_forge([Auto], {"auto.cache": str(tmp_path / "file")})


def test_of_several_writers_the_last_wins_and_every_reader_finds_a_whole_file(tmp_path: Path) -> None:
    file, wrong = tmp_path / "times.json", []

    def write(seconds: float) -> None:
        for _ in range(50):
            measuring._remember(file, {"sdpa": seconds, "varlen": 1.0})
            found = measuring._recall(file, ["sdpa", "varlen"])
            if found is None or found["sdpa"] not in (1.0, 2.0, 3.0):
                wrong.append(found)

    threads = [threading.Thread(target=write, args=(float(one),)) for one in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [path.name for path in tmp_path.iterdir()] == ["times.json"]


def test_a_resumed_run_keeps_its_kernel_bit_for_bit(
    run_forge: RunForge, clock: tuple[Times, list[str]], said: Callable[[], list[str]], tmp_path: Path
) -> None:
    settings = {"auto.cache": str(tmp_path / "cache"), "checkpoint.every": 2}
    whole = run_forge([Auto], settings, steps=4, folder=tmp_path / "whole")
    run_forge([Auto], settings, steps=4, folder=tmp_path / "parts", stop_at=2, name="r")
    for file in (tmp_path / "cache").iterdir():
        file.unlink()
    clock[0]["flex"] = 0.1
    resumed = run_forge([Auto], settings, steps=4, folder=tmp_path / "parts", name="r")
    assert taken(resumed) == "varlen"
    assert said()[-2:] == [said()[-2], "auto: attention by varlen, as before in this run"]
    assert "auto: attention by flex: " in said()[-2]
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_kernel_that_is_gone_is_said_to_be(
    run_forge: RunForge, clock: tuple[Times, list[str]], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    run = run_forge([Auto], {"auto.cache": str(tmp_path / "cache")})
    plugin = run.job.hooks.plugins["auto"]
    logging.getLogger("forge_train").propagate = True
    plugin.load_state_dict({"kernel": "flash"})
    assert taken(run) == "varlen"
    assert (
        "so far this run used the attention kernel flash, which can't run now; it continues with varlen" in caplog.text
    )


class Bending(Plugin):
    """Needs soft caps."""

    api = (1, 0)

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities:
        return KernelCapabilities(soft_caps=True, dropout=True)


def test_only_kernels_that_can_are_measured(run_forge: RunForge, clock: tuple[Times, list[str]]) -> None:
    assert taken(run_forge([Auto, Bending])) == "eager"
    assert clock[1] == []


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        ((), r"auto\.kernels: names no kernel\."),
        (("sdpq",), r"auto\.kernels: .*'sdpq'.* Did you mean 'sdpa'"),
        (("adamw",), r"auto\.kernels: 'adamw' is not an attention kernel that auto can choose\."),
        (("auto",), r"auto\.kernels: 'auto' is not an attention kernel that auto can choose\."),
        (
            ("flash",),
            r"auto\.kernels: none of them can do what the run needs\. Missing: flash: it runs on cuda only",
        ),
    ],
)
def test_a_list_that_can_not_be_is_refused(kernels: tuple[str, ...], says: str, run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match=says):
        run_forge([Auto], {"auto.kernels": kernels})


@pytest.mark.slow
def test_measuring_leaves_torchs_random_state_alone_and_finds_what_is_slow(run_forge: RunForge) -> None:
    run = run_forge([Auto])
    shape = measuring.Shape(run.job, KernelCapabilities(documents=True, head_dims=(8,)))
    kernels = run.job.hooks.plugins["auto"]._choice.kernels
    before = torch.get_rng_state()
    assert 0 < measuring.measure(kernels["sdpa"], shape) < 60

    def failing(*given: Any, **asked: Any) -> Any:
        raise RuntimeError("out of memory")

    assert measuring.measure(failing, shape) == float("inf")
    assert torch.equal(torch.get_rng_state(), before)

"""Out of memory ends in one message: what was asked for and where, the peak by part, and what to change."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import warm
from forge_cli import DECODER, TESTS, Ended, environment, forge, one_message
from forge_train import Finished
from forge_train.compose.initialise import allocate
from forge_train.registry.discovery import discover, load
from forge_train_kit.facts import SAVES
from forge_train_kit.plugins import find
from forge_train_plugins.resilience._out_of_memory import Held, Report, requested

pytestmark = [pytest.mark.e2e]

DRIVER = """
import contextlib, io, json, os, pathlib, sys

from forge_train_cli.app import run

folder = pathlib.Path(sys.argv[1])
for name, arguments in json.loads(sys.argv[2]).items():
    if os.fork() == 0:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(arguments)
        (folder / f"{name}.json").write_text(json.dumps([code, out.getvalue(), err.getvalue()]))
        os._exit(0)
    os.wait()
"""
"""Runs each of several commands in a child, so that one cap does not bind the next."""

WIDE = (
    *("-s", "decoder.dim=64", "-s", "decoder.layers=2", "-s", "decoder.max_sequence=1024"),
    *("-s", "train.sequence=1024", "-s", "train.global_batch=12", "-s", "train.micro_batch=6"),
)
"""Activations are most of what this takes."""
LARGE = ("-s", "decoder.dim=512", "-s", "decoder.vocabulary=65536")
"""Parameters are: 64 million of them, four bytes each, and twice that in the optimizer."""
CASES = {
    "building": (*LARGE, "-s", "cap.at=building", "-s", "cap.room=100"),
    "forward": (*WIDE, "-s", "cap.at=forward", "-s", "cap.room=8"),
    "backward": (*WIDE, "-s", "cap.at=backward", "-s", "cap.room=8"),
    "optimizer": (*LARGE, "-s", "cap.at=optimizer", "-s", "cap.room=100"),
    "recomputing": (*WIDE, "-p", "ac", "-s", "train.micro_batch=1", "-s", "cap.at=forward", "-s", "cap.room=1"),
}
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("memory")
    (made / "text.txt").write_text("\n".join(f"line {n}: {n * n % 97}" for n in range(4000)), encoding="utf-8")
    text = f'[text]\npath = "{made / "text.txt"}"\nbaseline = false\n'
    (made / "capped.toml").write_text(f'plugins = ["capped:Cap"]\n{DECODER}{text}', encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """How each of the runs did."""
    runs = {name: ["train", "capped.toml", "--quiet", "--name", name, *more] for name, more in CASES.items()}
    (folder / "driver.py").write_text(DRIVER, encoding="utf-8")
    driver = [sys.executable, "-m", "driver", str(folder), json.dumps(runs)]
    with warm.Popen(driver, cwd=folder, env=environment()) as process:
        assert process.wait() == 0
    return {name: Ended(*json.loads((folder / f"{name}.json").read_text())) for name in runs}


def parts(message: str) -> dict[str, float]:
    """Part → MiB."""
    units = {"B": 1 / MIB, "KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}
    found = re.findall(r"^  (\w+) +([\d.]+) (B|KiB|MiB|GiB)$", message, re.MULTILINE)
    return {part: float(number) * units[unit] for part, number, unit in found}


def helps(message: str) -> list[str]:
    advice = message.partition("What would help:\n")[2].partition("The traceback")[0]
    return [
        re.split(r"[ :(]", line.strip().removeprefix("--plugins ").removeprefix("-s "))[0]
        for line in advice.splitlines()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "at", "advice"),
    [
        ("building", "building", ["fsdp2"]),
        ("forward", "step 1, forward", ["train.micro_batch=3", "ac", "cp"]),
        ("backward", "step 1, backward", ["train.micro_batch=3", "ac", "cp"]),
        ("optimizer", "step 1, the optimizer", ["fsdp2"]),
        ("recomputing", "step 1, forward", ["train.sequence=512", "cp"]),
    ],
)
def test_one_message(folder: Path, ended: dict[str, Ended], case: str, at: str, advice: list[str]) -> None:
    message = one_message(ended[case], 1)
    first = re.match(r"Out of memory on cpu \((.+)\): [\d.]+ [KMG]iB more were asked for \(([\d,]+) bytes\)\.", message)
    assert first, message
    assert first[1] == at
    log = folder / "runs" / case / "log" / "rank-0.log"
    text = log.read_text(encoding="utf-8")
    assert f"you tried to allocate {first[2].replace(',', '')} bytes" in text
    assert "Traceback" in text
    assert message.endswith(f"The traceback is in {log.relative_to(folder)}.")
    assert list(parts(message)) == ["parameters", "gradients", "optimizer", "activations"]
    assert [one for one in helps(message) if not (one == "fsdp2" and "fsdp2" not in advice)] == advice
    outcome = json.loads((folder / "runs" / case / "outcome.json").read_text())
    assert (outcome["outcome"], outcome["code"]) == ("failed", 1)


@pytest.mark.slow
def test_the_parts_are_what_the_run_held(ended: dict[str, Ended]) -> None:
    building, optimizer, backward = (parts(ended[name].err) for name in ("building", "optimizer", "backward"))
    weights = 65536 * 512 * 2 * 4 / MIB  # embedding and head, and some hundred thousand more
    assert building["parameters"] == pytest.approx(weights, rel=0.1)
    assert building["gradients"] == building["optimizer"] == 0
    assert optimizer["parameters"] == optimizer["gradients"] == building["parameters"]
    assert optimizer["optimizer"] < 2 * weights  # it was being made
    kept = 6 * 1024 * 64 * 4 / MIB  # one tensor of hidden states: a block keeps a dozen, or of that size
    assert 2 * 5 * kept < backward["activations"] < 2 * 80 * kept
    assert max(backward["parameters"], backward["gradients"]) < 1


@pytest.mark.slow
def test_of_several_ranks_the_first_is_told_once(folder: Path) -> None:
    arguments = ("--quiet", "--nproc", 2, "--name", "two", *CASES["backward"], "-s", "cap.rank=1")
    with contextlib.chdir(folder):
        ended = forge("train", "capped.toml", *arguments, environment={"PYTHONPATH": str(TESTS)})
    message = one_message(ended, 1)
    assert message.startswith("Rank 1: Out of memory on cpu (step 1, backward): ")
    assert message.count("Out of memory") == 1
    assert "Rank 0 ended because of it" in message
    assert helps(message)[:2] == ["train.micro_batch=3", "ac"]
    assert "The traceback is in runs/two/log/rank-1.log." in message
    assert "Traceback" in (folder / "runs" / "two" / "log" / "rank-1.log").read_text(encoding="utf-8")


def test_what_plugins_say_they_save_is_read_as_text_as_it_is() -> None:
    said = {found.name: SAVES.read(found) for found in discover()}
    assert said == {found.name: SAVES.of(load(found)) for found in discover()}
    assert {"ac", "fsdp2"} <= {name for name, saves in said.items() if saves}


def report(job: Any = None, *, step: int = 0, model: Any = None) -> Report:
    failed = Finished("failed", step, None, 1, Path("run"), error=MemoryError(), model=model, log=Path("log"))
    return Report(failed, job, 0)


@pytest.mark.parametrize(
    ("world", "device", "enabled", "says"),
    [
        (1, "cpu", (), "--plugins fsdp2 with several ranks on other machines: Shards"),
        (1, "cuda", (), "--plugins fsdp2 with several ranks: Shards"),
        (2, "cuda", ("ddp",), "--plugins fsdp2: Shards"),
        (2, "cuda", ("fsdp2",), "more ranks (now 2): fsdp2 gives each of them a smaller share"),
    ],
)
def test_ranks_are_recommended_where_they_help(world: int, device: str, enabled: tuple[str, ...], says: str) -> None:
    plugins = {name: SimpleNamespace(cls=load(find(name))) for name in enabled}
    job = SimpleNamespace(
        dist=SimpleNamespace(world=world), device=torch.device(device), hooks=SimpleNamespace(enabled=plugins)
    )
    (line,) = report(job)._about_ranks(Held(parameters=4, gradients=4, optimizer=8, activations=1))
    assert line.startswith(says)


@pytest.mark.parametrize("stepped", [False, True])
def test_gradients_count_once_there_was_a_step_though_they_are_gone(stepped: bool) -> None:
    held = report(step=int(stepped), model=torch.nn.Linear(10, 10)).peak()
    assert held.parameters == 4 * 110
    assert held.gradients == (4 * 110 if stepped else 0)


def test_other_errors_are_none_of_it() -> None:
    assert requested(RuntimeError("shapes do not fit")) is None
    assert requested(ValueError("out of memory")) is None
    assert requested(MemoryError()) == 0
    wrapped = LookupError("where it was noticed")
    wrapped.__cause__ = RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of")
    assert requested(wrapped) == int(2.5 * 2**30)


def test_weights_that_this_machine_can_not_hold_are_refused_before_they_are_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux would grant the memory, and kill the process later, without a word."""
    part = torch.nn.Linear(10, 100, device="meta")
    monkeypatch.setattr("forge_train.compose.initialise.physical_memory", lambda: 4399)
    with pytest.raises(MemoryError, match="tried to allocate 4400 bytes") as caught:
        allocate(part, torch.device("cpu"))
    assert requested(caught.value) == 4400
    monkeypatch.setattr("forge_train.compose.initialise.physical_memory", lambda: 4400)
    allocate(part, torch.device("cpu"))
    assert part.weight.device.type == "cpu"

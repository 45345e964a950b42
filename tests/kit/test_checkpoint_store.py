"""Checkpoints in object stores: whole or invisible, whichever call fails, and whenever the process dies."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from bucket import bucket, keys
from forge_cli import environment
from forge_train import ConfigError
from forge_train.checkpoint import checkpoint
from forge_train.checkpoint.checkpoint import load
from forge_train.checkpoint.seal import ALONE
from forge_train_kit.stores.copies import Sender, Sent, bring
from forge_train_kit.stores.store import Store
from saving import save_step

pytestmark = [pytest.mark.unit]

ADDRESS = "bucket://b/run"


def write(place: Path, step: int) -> None:
    state = {"model": {"w": torch.full((4, 3), float(step))}, "step": step}
    tokenizer = place.parent / "tokenizer"
    save_step(place, step, state, ALONE, beside=[tokenizer] if tokenizer.exists() else [])


def value(path: Path) -> float:
    """What the weights of a checkpoint are, every file of which was compared with its manifest."""
    assert checkpoint.check(path, contents=True) == ""
    held = load(path, {}, ALONE)["model"]["w"].unique()
    assert len(held) == 1
    return float(held)


def steps(address: str = ADDRESS) -> list[int]:
    return [stored.step for stored in Store(address).newest()]


def one_round(place: Path, address: str = ADDRESS, keep: int = 2) -> Sent:
    told: list[Sent] = []
    sender = Sender(place, [Store(address, "checkpoint.folder")], keep, 0, tell=told.append)
    sender.send()
    assert sender.wait() == {gone.step for sent in told for gone in sent.pruned}
    (sent,) = told
    return sent


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run's checkpoints: steps 1 and 2."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    write(folder, 1)
    write(folder, 2)
    return folder


@pytest.fixture
def memory() -> Iterator[str]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield "memory://runs/first/checkpoints"
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("where", ["memory", "folder", "file", "bucket"])
def test_a_round_copies_what_is_lacking_and_removes_what_is_old(
    tmp_path: Path, place: Path, memory: str, where: str
) -> None:
    address = {
        "memory": memory,
        "folder": str(tmp_path / "far" / "run"),
        "file": f"file://{tmp_path}/far",
        "bucket": ADDRESS,
    }[where]
    with bucket(tmp_path / "bucket"):
        sent = one_round(place, address)
        assert ([one.step for one in sent.copied], sent.steps, sent.problem) == ([2, 1], {1, 2}, "")
        assert one_round(place, address).copied == []
        (place.parent / "tokenizer").mkdir()
        (place.parent / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
        write(place, 3)
        sent = one_round(place, address)
        assert ([one.step for one in sent.copied], [gone.step for gone in sent.pruned]) == ([3], [1])
        assert steps(address) == [3, 2]
        back = bring([Store(address)], tmp_path / "other", after=2)
        assert back == tmp_path / "other" / "step-00000003"
        assert value(back) == 3
        assert (back / "tokenizer" / "tokenizer.json").read_text() == "{}"
        assert bring([Store(address)], tmp_path / "other", after=3) is None


@pytest.mark.parametrize("call", ["ls", "cat"])
def test_what_a_run_removes_while_a_round_looks_for_it_stays_in_the_store(
    tmp_path: Path, place: Path, call: str
) -> None:
    def remove(what: str) -> None:
        if what.startswith(call) and "step-00000001" in what:
            shutil.rmtree(place / "step-00000001", ignore_errors=True)

    with bucket(tmp_path / "bucket"):
        one_round(place)
    with bucket(tmp_path / "bucket", remove):
        assert (one_round(place).problem, steps()) == ("", [2, 1])
    assert not (place / "step-00000001").exists()


def test_what_was_due_is_copied_although_the_first_round_can_t_be_told(tmp_path: Path, place: Path) -> None:
    def tell(sent: Sent) -> None:
        raise OSError("No space left on device")

    with bucket(tmp_path / "bucket"):
        sender = Sender(place, [Store(ADDRESS)], 2, 0, tell=tell)
        sender.send()
        write(place, 3)
        sender.send()
        with pytest.raises(OSError, match="No space left"):
            sender.wait()
        assert steps() == [3, 2]


def trials(tmp_path: Path, place: Path, fails: Any) -> Iterator[tuple[Sent, bool]]:
    """Copy step 3 to a store that holds 1 and 2, with a failure at each call in turn, until no call is left to fail."""
    far = tmp_path / "bucket"
    with bucket(far):
        one_round(place)
    write(place, 3)
    shutil.copytree(far, tmp_path / "start")
    for at in range(1, 1000):
        calls: list[str] = []

        def call(what: str, calls: list[str] = calls, at: int = at) -> None:
            calls.append(what)
            if fails(len(calls), at):
                raise ConnectionError(what)

        shutil.rmtree(far)
        shutil.copytree(tmp_path / "start", far)
        with bucket(far, call):
            sent = one_round(place)
        last = len(calls) < at
        with bucket(far):
            assert steps() in ([2, 1], [3, 2, 1], [3, 2])
            for stored in Store(ADDRESS).newest():
                assert value(Store(ADDRESS).fetch(stored, tmp_path / "fetched" / stored.name)) == stored.step
            yield sent, last
        if last:
            return
    raise AssertionError("it never came to an end")


@pytest.mark.slow
def test_a_store_that_fails_once_at_any_call_is_asked_again(tmp_path: Path, place: Path) -> None:
    count = 0
    for sent, _ in trials(tmp_path, place, lambda number, at: number == at):
        count += 1
        assert (sent.problem, sent.steps, steps()) == ("", {1, 2, 3} - {1}, [3, 2])
    assert count > 40  # so many calls there are


@pytest.mark.slow
def test_a_store_that_is_gone_from_any_call_on_keeps_a_whole_checkpoint(tmp_path: Path, place: Path) -> None:
    seen = []
    for sent, last in trials(tmp_path, place, lambda number, at: number >= at):
        assert not (last and sent.problem)
        assert "(6 tries)" in sent.problem or steps() == [3, 2]  # the last removal may be done although its call failed
        seen.append(steps())
        one_round(place)  # once it is back
        assert steps() == [3, 2]
        assert {key.split("/")[2] for key in keys(tmp_path / "bucket")} == {"step-00000002", "step-00000003"}
    assert [list(one) for one in dict.fromkeys(map(tuple, seen))] == [[2, 1], [3, 2, 1], [3, 2]]


DRIVER = '''
"""Copies a third checkpoint to a store and removes the first there, in a child for every call, killed at its own."""
import os, pathlib, shutil, signal, sys

from bucket import bucket
from forge_train_kit.stores import store
from forge_train_kit.stores.copies import Sender
from forge_train_kit.stores.store import Store

folder, address = pathlib.Path(sys.argv[1]), sys.argv[2]
at = 0
while True:
    at += 1
    far, left = folder / f"bucket-{at}", [at]
    shutil.copytree(folder / "start", far)
    def call(what):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if child == 0:
        with bucket(far, call):
            told = []
            sender = Sender(folder / "run" / "checkpoints", [Store(address)], 2, 0, tell=told.append)
            sender.send()
            sender.wait()
            os._exit(bool(told[0].problem))
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        sys.exit(os.WEXITSTATUS(status))
'''


@pytest.mark.slow
@pytest.mark.e2e
def test_killed_at_any_call(tmp_path: Path, place: Path) -> None:
    with bucket(tmp_path / "start"):
        one_round(place)
    write(place, 3)
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path), ADDRESS],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    seen = []
    trials = sorted(tmp_path.glob("bucket-*"), key=lambda path: int(path.name.partition("-")[2]))
    for far in trials:
        with bucket(far):
            seen.append(steps())
            for stored in Store(ADDRESS).newest():
                assert value(Store(ADDRESS).fetch(stored, tmp_path / "fetched" / stored.name)) == stored.step
            one_round(place)
            assert steps() == [3, 2]
            assert {key.split("/")[2] for key in keys(far)} == {"step-00000002", "step-00000003"}
    assert len(seen) > 40
    assert [list(one) for one in dict.fromkeys(map(tuple, seen))] == [[2, 1], [3, 2, 1], [3, 2]]


def test_what_is_fetched_is_whole_or_not_there_whichever_call_fails(tmp_path: Path, place: Path) -> None:
    with bucket(tmp_path / "bucket"):
        one_round(place)
    came: list[bool] = []
    for at in range(1, 100):
        calls: list[str] = []

        def call(what: str, calls: list[str] = calls, at: int = at) -> None:
            calls.append(what)
            if len(calls) >= at:
                raise ConnectionError(what)

        with bucket(tmp_path / "bucket", call):
            target = tmp_path / f"fetched-{at}"
            path = None
            with contextlib.suppress(ConfigError):
                path = bring([Store(ADDRESS)], target)
        came.append(path is not None)
        assert path is None or value(path) == 2
        left = [one.name for one in target.iterdir()] if target.exists() else []
        assert left == ([] if path is None else ["step-00000002"])
        if len(calls) < at:
            break
    assert came == [False] * (len(came) - 1) + [True]
    assert len(came) > 10

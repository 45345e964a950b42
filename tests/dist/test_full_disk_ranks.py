"""A full disk on several ranks: one message that names the disk, wherever the writing stops, and nothing half done."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import toys
from forge_cli import forge_process
from forge_train.checkpoint.checkpoint import check, found
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]
TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("world", "ending", "rank", "below"),
    [
        (1, "rank-00000-0.safetensors", 0, ".partial"),
        (2, "rank-00001-0.safetensors", 1, ".partial"),  # an exception loses what caused it on its way to another rank
        (2, "tensors.json", 0, ".partial"),
        (2, "state.json", 0, ".partial"),
        (2, "plugins.json", 0, ".partial"),
        (2, "manifest.json", 0, ".partial"),
        (2, "latest", 0, "checkpoints"),
        (2, "-of-00001.safetensors", 1, ".partial"),
        (2, "model.safetensors.index.json", 0, ".partial"),
        (3, "rank-00002-0.safetensors", 2, ".partial"),
        pytest.param(4, "state.json", 0, ".partial", marks=pytest.mark.extended),
    ],
)
def test_every_rank_says_the_same_wherever_a_save_stops(
    ranks: Pool, tmp_path: Path, world: int, ending: str, rank: int, below: str
) -> None:
    arguments = {"folder": str(tmp_path), "ending": ending, "rank": rank, "below": below}
    told = {one["error"] for one in ranks.run("full_disk:refused", world, timeout=100, **arguments)}
    kept = "step-00000001" if ending == "latest" else None
    newest = f"The newest whole checkpoint is {kept}." if kept else "There is no earlier checkpoint."
    target = tmp_path / "run" / "checkpoints" / "step-00000001"
    (message,) = told
    expected = rf"{target}: can't save the checkpoint: No space left on device \(the disk at .* left\)\. {newest}"
    assert re.fullmatch(rf"{expected} Make room there, then go on\.", message)
    assert not [path for path in (tmp_path / "run").rglob("*") if "partial" in path.name]
    assert [saved.path.name for saved in found(target.parent) if not check(saved.path, contents=True)] == [kept] * bool(
        kept
    )
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text(encoding="utf-8"))
    assert (outcome["outcome"], outcome["code"]) == ("failed", 1)
    assert "Traceback" not in (tmp_path / "run" / "log" / "rank-0.log").read_text(encoding="utf-8")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 600 KiB; the tests above need none."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.e2e
def test_three_processes_on_a_disk_that_fills_up_and_stays_full(tmp_path: Path, disk: Path) -> None:
    values = {"train.steps": 40, "checkpoint.every": 1, "checkpoint.keep": 40, "log.every": 1}
    config = toys.write_config(tmp_path, "layouts:Replicas", **{**values, "train.global_batch": 6})

    def forge(*more: str) -> str:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "dist")])}
        arguments = ("train", config, "--without=fsdp2", "--quiet", *more)
        ended = forge_process(*arguments, preloaded=True, cwd=disk, env=env, timeout=300)
        assert ended.code == 1, ended.err
        assert len(ended.err.splitlines()) <= 3, ended.err
        assert ended.err.count("Error:") == 1
        refusal = r"(No space left on device|it takes \d+ KiB) \(the disk at "  # while writing, or before
        assert re.search(refusal + re.escape(f"{disk} has "), ended.err), ended.err
        assert not [path for path in disk.rglob("*") if "partial" in path.name]
        return ended.err

    first = forge("--name", "run", "--nproc", "3", "--max-restarts", "2")
    assert "can't save the checkpoint" in first
    assert "start again" not in first, "another attempt would find no room either"
    saved = found(disk / "runs" / "run" / "checkpoints")
    assert saved
    assert all(check(one.path, contents=True) == "" for one in saved)
    assert json.loads((disk / "runs" / "run" / "outcome.json").read_text())["outcome"] == "failed"
    with (disk / "fill").open("wb", buffering=0) as out:  # and now there is no room at all
        try:
            while True:
                out.write(bytes(4096))
        except OSError:
            pass
    for nproc in ("3", "1"):
        again = forge("--name", "run", "--nproc", nproc)
        assert "runs/run: can't write the run folder" in again
        assert "No space left on device" in again
    assert [one.path for one in found(disk / "runs" / "run" / "checkpoints")] == [one.path for one in saved]

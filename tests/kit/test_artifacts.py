"""Artifacts: recorded with size, hash and author in the background, and what `forge runs show` says of them later."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from forge_cli import forge
from forge_train import Plugin, PluginError, hookimpl
from forge_train_kit.artifacts import RECORDED, Recorder
from forge_train_tools.artifacts import recorded
from forge_train_tools.testing import Pool, RunForge


class Draws(Plugin):
    """Writes a file, a folder of two, and one elsewhere."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any) -> None:
        for name in ("a.txt", "folder/b.txt", "folder/c.txt", "folder/new\nline"):
            job.run.artifact(name).write_text(name)
        elsewhere = job.run.dir.parent / "export.bin"
        elsewhere.write_bytes(b"x" * 3)
        for path in (job.run.dir / "artifacts" / "a.txt", job.run.dir / "artifacts" / "folder", elsewhere):
            job.record(path, self)


def test_what_is_recorded_and_what_has_become_of_it(run_forge: RunForge) -> None:
    run = run_forge([Draws], name="drawn").run
    elsewhere = str((run.parent / "export.bin").absolute())
    found = {one.path: one for one in recorded(run)}
    assert {elsewhere, "artifacts/a.txt", "artifacts/folder/b.txt", "artifacts/folder/c.txt"} <= set(found)
    a = found["artifacts/a.txt"]
    assert (a.bytes, a.sha256, a.plugin) == (5, hashlib.sha256(b"a.txt").hexdigest(), "draws")
    (run / "artifacts" / "a.txt").write_text("longer")
    (run / "artifacts" / "folder" / "b.txt").unlink()
    shown = json.loads(forge("runs", "show", run, "--json").out)["artifacts"]
    states = {one["path"]: one["state"] for one in shown}
    assert states["artifacts/a.txt"] == "changed"
    assert states["artifacts/folder/b.txt"] == "missing"
    assert states["artifacts/folder/c.txt"] == states[elsewhere] == "whole"
    text = forge("runs", "show", run).out
    assert "artifacts/folder/new\\nline " in text
    for words in ("has another size now", "is missing", f"sha256 {found['artifacts/folder/c.txt'].sha256[:12]}"):
        assert words in text


def test_files_of_built_in_plugins(run_forge: RunForge) -> None:
    run = run_forge(["profile", "sample"], {"profile.start": 1, "profile.steps": 1, "sample.tokens": 4}).run
    assert {(one.plugin, one.path) for one in recorded(run)} >= {
        ("profile", "artifacts/profile/trace-rank-0.json.gz"),
        ("profile", "artifacts/profile/rank-0.txt"),
        ("sample", "artifacts/sample.txt"),
    }


def test_nobody_waits_for_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, real = threading.Event(), hashlib.file_digest

    def slow(*arguments: Any) -> Any:
        held.wait(30)
        return real(*arguments)

    monkeypatch.setattr(hashlib, "file_digest", slow)
    (tmp_path / "large").write_bytes(b"large")
    recorder = Recorder(tmp_path)
    recorder.record(tmp_path / "large", "one", "rank-0")
    assert recorded(tmp_path) == []  # and not after half a minute
    held.set()
    recorder.settle()
    assert [one.path for one in recorded(tmp_path)] == ["large"]


def test_the_last_record_of_a_file_counts_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    for content in (b"one", b"another"):
        (tmp_path / "file").write_bytes(content)
        recorder = Recorder(tmp_path)
        recorder.record(tmp_path / "file", "one", "rank-0")
        recorder.settle()
    with (tmp_path / RECORDED / "rank-0.jsonl").open("a") as out:
        out.write('{"path": "fi')
    (one,) = recorded(tmp_path)
    assert one.bytes == 7


def test_what_can_not_be_recorded(run_forge: RunForge) -> None:
    class Forgets(Plugin):
        """Records what it never wrote."""

        api = (1, 0)

        @hookimpl
        def on_gradients(self, update: Any) -> None: ...

        @hookimpl
        def on_start(self, job: Any) -> None:
            job.record(job.run.artifact("nothing"), self)

    with pytest.raises(FileNotFoundError, match=r"artifacts/nothing can't be recorded: there is no such file"):
        run_forge([Forgets])

    class Strange(Forgets):
        """Gives somebody else as the author."""

        @hookimpl
        def on_start(self, job: Any) -> None:
            job.record(job.run.dir / "config.toml", job)

    with pytest.raises(PluginError, match="Job belongs to no enabled plugin"):
        run_forge([Strange])


@pytest.mark.slow
@pytest.mark.dist
def test_every_rank_records_its_own(ranks: Pool, tmp_path: Path) -> None:
    (folder, *_) = ranks.run("artifact_cases:train", 2, folder=str(tmp_path))
    assert [one.path for one in recorded(Path(folder)) if one.plugin == "profile"] == [
        f"artifacts/profile/{name}"
        for name in ("rank-0.txt", "rank-1.txt", "trace-rank-0.json.gz", "trace-rank-1.json.gz")
    ]


def test_an_export_is_an_artifact_of_its_run(run_forge: RunForge, tmp_path: Path) -> None:
    run = run_forge(config={"checkpoint.every": 3}, name="exported").run
    assert forge("checkpoint", "export", run, tmp_path / "hf").code == 0
    weights = tmp_path / "hf" / "model.safetensors"
    (found,) = [one for one in recorded(run) if one.path == str(weights)]
    assert found.plugin == "forge checkpoint export"
    assert found.sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()

"""`forge data prepare`: the same shards for any workers and after any kill, and nothing half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_train import ConfigError
from forge_train_kit.data.manifest import open_prepared, read_manifest
from forge_train_kit.data.prepare import Preparation, Report, prepare, tasks
from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_kit.data.tokens import open_tokens

pytestmark = pytest.mark.unit

KILLED = """
import os, signal, sys
from pathlib import Path
from forge_train_kit.data import prepare
from forge_train_kit.data.prepare import pool, tasks, worker
tasks.TASK = 500
left, real = int(sys.argv[3]), worker.ShardWriter.add
def add(self, *arguments):
    global left
    left -= 1
    real(self, *arguments)
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
worker.ShardWriter.add = add
prepare.prepare(prepare.Preparation((sys.argv[1],), Path(sys.argv[2]), held_out=0.2), prepare.Report())
"""

PARENT_KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
import psutil
from forge_train_kit.data import prepare
from forge_train_kit.data.prepare import tasks
tasks.TASK = 500
def end():
    while len(found := psutil.Process().children()) < 3:  # two workers, and a tracker of resources
        time.sleep(0.01)
    print(*(one.pid for one in found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=end).start()
prepare.prepare(prepare.Preparation((sys.argv[1],), Path(sys.argv[2]), workers=2), prepare.Report())
time.sleep(60)
"""


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hundred small documents in files of two kinds, and tasks that are small too."""
    monkeypatch.setattr(tasks, "TASK", 500)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        lines = [json.dumps({"text": f"line {number} {line} " + "ab " * (number + line)}) for line in range(10)]
        (folder / f"{number:02}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def everything(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without what only a preparation needs."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def documents(folder: Path) -> list[bytes]:
    """The texts of both sides, sorted."""
    found = []
    for side in open_prepared(folder, key="x").sides.values():
        for at in range(side.count):
            start, stop = side.span(at)
            ids = np.empty(stop - start, np.int64)
            side.take(start, ids)
            assert ids[-1] == 256
            found.append(bytes(ids[:-1].tolist()))
    return sorted(found)


def written(folder: Path) -> list[bytes]:
    lines = [line for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    return sorted(json.loads(line)["text"].encode() for line in lines)


def wanted(texts: Path, out: Path, **options: Any) -> Preparation:
    return Preparation((str(texts),), out, **{"held_out": 0.2, **options})


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_every_document_once_for_any_number_of_workers(texts: Path, tmp_path: Path, workers: int) -> None:
    manifest = prepare(wanted(texts, tmp_path / "out", workers=workers), Report())
    assert documents(tmp_path / "out") == written(texts)
    assert len(manifest.shards["train"]) > 3
    assert manifest.total("documents") == 120
    assert 5 < manifest.total("documents", "validation") < 60
    again = prepare(wanted(texts, tmp_path / "again"), Report())
    assert everything(tmp_path / "out") == everything(tmp_path / "again")
    assert again == manifest


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_workers_end_with_a_parent_that_was_killed(texts: Path, tmp_path: Path) -> None:
    """Else they would wait for tasks for ever, and a task under way would go on writing beside the next preparation."""
    psutil = pytest.importorskip("psutil")
    command = [sys.executable, "-c", PARENT_KILLED, str(texts), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert parent.returncode == -signal.SIGKILL
    assert len(workers) == 3
    deadline = time.monotonic() + 60
    while alive := [pid for pid in workers if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        assert time.monotonic() < deadline, f"{alive} are still there"
        time.sleep(0.05)


@pytest.mark.parametrize("writes", [0, 1, 5, 9])
def test_goes_on_after_a_kill(texts: Path, tmp_path: Path, writes: int) -> None:
    out = tmp_path / "out"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(texts), str(out), str(writes)], check=False)
    assert ended.returncode == -signal.SIGKILL
    with pytest.raises(ConfigError, match="was not prepared to the end: run the same"):
        read_manifest(out, key="tokens.path")
    if list(out.glob(".prepare/[0-9]*.json")):
        with pytest.raises(ConfigError, match="was begun with something else \\(field\\)"):
            prepare(wanted(texts, out, field="other"), Report())
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("*.tokens")}
    prepare(wanted(texts, out), Report())
    prepare(wanted(texts, tmp_path / "whole"), Report())
    assert everything(out) == everything(tmp_path / "whole")
    done = {path for path, stamp in stamps.items() if path.stat().st_mtime_ns == stamp}
    assert len(done) >= max(0, len(stamps) - 2), "what was done is not done again"


def test_a_second_run_does_nothing(texts: Path, tmp_path: Path) -> None:
    first = prepare(wanted(texts, tmp_path / "out"), Report())
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    report = Report()
    assert prepare(wanted(texts, tmp_path / "out"), report) == first
    assert report.read == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == stamps


def test_a_shard_that_was_damaged_is_made_again(texts: Path, tmp_path: Path) -> None:
    prepare(wanted(texts, tmp_path / "out"), Report())
    expected = everything(tmp_path / "out")
    shard = tmp_path / "out" / "train-00002.tokens"
    data = bytearray(shard.read_bytes())
    data[1030:1040] = b"\xff" * 10  # what only its hash shows
    shard.write_bytes(data)
    prepare(wanted(texts, tmp_path / "out"), Report())
    assert everything(tmp_path / "out") == expected
    (tmp_path / "out" / "train-00001.tokens").write_bytes(b"x")
    with pytest.raises(ConfigError, match="train-00001.tokens: is no token shard"):
        open_prepared(tmp_path / "out", key="x")
    prepare(wanted(texts, tmp_path / "out"), Report())
    assert everything(tmp_path / "out") == expected


def test_an_edited_manifest_is_told(texts: Path, tmp_path: Path) -> None:
    prepare(wanted(texts, tmp_path / "out"), Report())
    file = tmp_path / "out" / "manifest.json"
    table = json.loads(file.read_text())
    table["shards"]["train"] *= 2
    file.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"manifest.json was changed since it was written"):
        open_prepared(tmp_path / "out", key="x")


def test_a_first_mistake_can_be_mended(texts: Path, tmp_path: Path) -> None:
    """While nothing is done, the same folder may be begun with something else."""
    good = (texts / "00.jsonl").read_text()
    (texts / "00.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="00.jsonl"):
        prepare(wanted(texts, tmp_path / "out"), Report())
    with pytest.raises(ConfigError, match="rate=2"):
        prepare(wanted(texts, tmp_path / "maps", maps=("fim:rate=2",)), Report())
    assert not (tmp_path / "maps").exists()
    (texts / "00.jsonl").write_text(good)
    assert prepare(wanted(texts, tmp_path / "out"), Report()).total("documents") == 120


def test_changed_sources_are_told(texts: Path, tmp_path: Path) -> None:
    prepare(wanted(texts, tmp_path / "out"), Report())
    (texts / "00.jsonl").write_text('{"text": "new"}\n')
    with pytest.raises(ConfigError, match=r"begun with something else \(files, such as .*00.jsonl\)"):
        prepare(wanted(texts, tmp_path / "out"), Report())


def test_other_folders_are_left_alone(texts: Path, tmp_path: Path) -> None:
    for path, message in ((texts, "a folder of other files"), (texts / "00.jsonl" / "x", "can't be written")):
        with pytest.raises(ConfigError, match=message):
            prepare(wanted(texts, path), Report())
    prepare(wanted(texts, tmp_path / "out"), Report())
    with pytest.raises(ConfigError, match="is a folder of token shards already"):
        prepare(wanted(tmp_path / "out", tmp_path / "other"), Report())


def test_two_at_once(texts: Path, tmp_path: Path) -> None:
    import fcntl

    out = tmp_path / "out"
    (out / ".prepare").mkdir(parents=True)
    with (out / ".prepare" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is being prepared by another process"):
            prepare(wanted(texts, out), Report())


def test_what_only_a_look_inside_shows(texts: Path, tmp_path: Path) -> None:
    """A Parquet file without its end can't even be divided; a share that is no number; a map that leaves nothing."""
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1" + b"x" * 100)
    both = Preparation((str(texts), str(broken)), tmp_path / "out")
    with pytest.raises(ConfigError, match="broken.parquet"):
        prepare(both, Report())
    report = Report()
    assert prepare(replace(both, out=tmp_path / "skipped", skip=True), report).total("documents") == 120
    assert [Path(file).name for file in report.skipped] == ["broken.parquet"]
    with pytest.raises(ConfigError, match="--held-out: expected a share from 0 up to 1, found nan"):
        prepare(wanted(texts, tmp_path / "nan", held_out=float("nan")), Report())
    with pytest.raises(ConfigError, match="no text in 12 files after --map length:least=9999"):
        prepare(wanted(texts, tmp_path / "none", maps=("length:least=9999",)), Report())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_line_is_told_or_left_out(texts: Path, tmp_path: Path, workers: int) -> None:
    with (texts / "05.jsonl").open("a") as file:
        file.write('{"text": 3}\n')
    with pytest.raises(ConfigError, match="05.jsonl, line 11: no string under 'text'"):
        prepare(wanted(texts, tmp_path / "out", workers=workers), Report())
    report = Report()
    manifest = prepare(wanted(texts, tmp_path / "skipped", workers=workers, skip=True), report)
    assert [Path(file).name for file in report.skipped] == ["05.jsonl"]
    assert manifest.total("documents") == 120


def test_a_full_disk(texts: Path, tmp_path: Path) -> None:
    """Files may have 4 kB here; nothing half-written stays, and with room it goes on."""
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from forge_train_cli import main; main()"
    )
    out = tmp_path / "out"
    command = [sys.executable, "-c", script, "data", "prepare", str(texts), "--out", str(out), "--held-out", "0.2"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    assert ended.returncode == 2, ended.stderr
    assert f"--out: {out} can't be written (File too large). What is done stays" in ended.stderr
    assert not list(out.glob(".*.part"))
    assert not (out / "manifest.json").exists()


@pytest.mark.slow
def test_a_trained_tokenizer_is_the_same_each_time(texts: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare(wanted(texts, tmp_path / name, train_tokenizer=300, workers=1 + (name == "two")), Report())
    one, two = (tmp_path / name / "tokenizer" / "tokenizer.json" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert everything(tmp_path / "one") == everything(tmp_path / "two")
    with pytest.raises(ConfigError, match="ids are too few"):
        prepare(wanted(texts, tmp_path / "three", train_tokenizer=10), Report())


def test_shards_of_different_preparations_do_not_mix(texts: Path, tmp_path: Path) -> None:
    prepare(wanted(texts, tmp_path / "one"), Report())
    prepare(wanted(texts, tmp_path / "two", train_tokenizer=300), Report())
    shard = "train-00000.tokens"
    (tmp_path / "one" / shard).write_bytes((tmp_path / "two" / shard).read_bytes())
    with pytest.raises(ConfigError, match="is not the shard that the manifest lists"):
        open_prepared(tmp_path / "one", key="x")
    with pytest.raises(ConfigError, match="was prepared with another tokenizer. Its own is"):
        open_tokens(tmp_path / "two", ByteTokenizer(), dtype="", held_out=0.1, key="tokens")


def test_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="there is no text in 1 file\\."):
        prepare(Preparation((str(tmp_path / "empty.txt"),), tmp_path / "out"), Report())


def test_few_files_hold_out_a_share_of_each(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line\n" * 200)
    manifest = prepare(replace(wanted(tmp_path / "a.txt", tmp_path / "out"), held_out=0.25), Report())
    assert [manifest.total("bytes", side) for side in ("train", "validation")] == [755, 245]

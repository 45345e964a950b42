"""`forge runs pack`, and `forge train` on a pack: equal bit for bit, or it says what differs."""

from __future__ import annotations

import json
import re
import shutil
import stat
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_command import Forge
from forge_train_kit.fingerprint import fingerprint


@pytest.fixture
def first(forge: Forge, folder: Path) -> Path:
    forge("train", "tiny.toml", "--name", "first", "-q")
    return folder / "runs" / "first"


_MADE: list[bytes] = []


@pytest.fixture
def packed(forge: Forge, folder: Path) -> Path:
    """`first.zip`; the run is trained and packed once."""
    if not _MADE:
        forge("train", "tiny.toml", "--name", "first", "-q")
        forge("runs", "pack", "first")
        _MADE.append((folder / "first.zip").read_bytes())
    (folder / "first.zip").write_bytes(_MADE[0])
    return folder / "first.zip"


@pytest.fixture(autouse=True)
def plugins_of_files() -> Iterator[None]:
    """Modules of files are imported anew, as in a new process."""
    before = list(sys.path)
    yield
    fingerprint.cache_clear()
    for name in [name for name in sys.modules if name.startswith("forge_train_file_") or name == "count_helper"]:
        del sys.modules[name]
    sys.path[:] = before


def index_of(pack: Path) -> dict[str, Any]:
    with zipfile.ZipFile(pack) as archive:
        found: dict[str, Any] = json.loads(archive.read("pack.json"))
    return found


def rewritten(pack: Path, change: dict[str, bytes | None], extra: dict[str | zipfile.ZipInfo, bytes]) -> Path:
    """Another zip, with some members changed or left out (None), and others added."""
    with zipfile.ZipFile(pack) as old:
        members = {name: old.read(name) for name in old.namelist()}
    other = pack.with_name("other.zip")
    with zipfile.ZipFile(other, "w") as new:
        for name, content in {**members, **change}.items():
            if content is not None:
                new.writestr(name, content)
        for member, content in extra.items():
            new.writestr(member, content)
    return other


def repeated(forge: Forge, *arguments: str, fails: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(forge("train", *arguments, "--json", fails=fails).out.splitlines()[-1])["repeat"]
    return found


def test_a_pack_repeats_its_run_bit_for_bit(forge: Forge, folder: Path, first: Path) -> None:
    forge("runs", "pack", "first")
    ended = forge("train", "first.zip", "--run-dir", "again")
    assert "Repeats first of first.zip. Nothing differs: plugins, packages, machine, data, settings." in ended.out
    assert "Equal bit for bit: 6 logged steps (tokens, loss, grad_norm, lr) and 2 evaluations." in ended.out
    (again,) = (folder / "again").iterdir()
    assert (again / "config.toml").read_bytes() == (first / "config.toml").read_bytes()
    lines = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [
        json.loads(line)["loss"] for line in (first / "metrics.jsonl").read_text().splitlines()
    ]


def test_the_same_run_makes_the_same_bytes(forge: Forge, folder: Path, first: Path) -> None:
    forge("runs", "pack", "first")
    packed = folder / "first.zip"
    forge("runs", "pack", "first", "-o", "second.zip")
    assert packed.read_bytes() == (folder / "second.zip").read_bytes()
    forge("runs", "pack", "first", "-o", "opened")
    with zipfile.ZipFile(packed) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {
            file.relative_to(folder / "opened").as_posix(): file.read_bytes()
            for file in (folder / "opened").rglob("*")
            if file.is_file()
        }
        assert set(archive.namelist()) == {
            *("pack.json", "given.toml", "report.html"),
            *(f"run/{name}.json" for name in ("plugins", "environment", "composition", "outcome")),
            *("run/config.toml", "run/metrics.jsonl", "run/events.jsonl"),
        }
        assert archive.read("given.toml") == (folder / "tiny.toml").read_bytes()
        assert {entry["hash"] for entry in json.loads(archive.read("run/plugins.json"))} > {""} - {""}
    environment = json.loads((folder / "opened" / "run" / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["given"]["config"] == "tiny.toml"
    forge("runs", "pack", "first", fails=2)  # nothing is overwritten


def test_tells_what_differs_and_from_which_step(forge: Forge, folder: Path, packed: Path) -> None:
    with (folder / "corpus.txt").open("a", encoding="utf-8") as file:
        file.write("other words\n" * 200)
    opened = folder / "opened"
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(opened)
    record(
        opened, "run/environment.json", lambda one: one | {"torch": "1.0", "packages": {"torch": "1.0", "gone": "2"}}
    )
    plugins = json.loads((opened / "run" / "plugins.json").read_text())
    plugins[0]["version"], plugins[1]["hash"] = "0.0.9", "0" * 64
    record(opened, "run/plugins.json", lambda _: plugins)
    found = repeated(forge, "opened", "-s", "adamw.lr=0.01", fails=1)
    told = {row["what"]: (row["packed"], row["here"]) for row in found["differences"]}
    assert told["torch"][0] == "1.0"
    assert told["package gone"] == ("2", "not installed")
    assert told[f"plugin {plugins[0]['name']}"][0] == "forge-train 0.0.9"
    assert told[f"plugin {plugins[1]['name']}"][0] == "source 00000000"
    assert told["adamw.lr"] == ("0.0003", "0.01")
    assert re.match(r"changed: .*, sha256 ", told["data: text.path"][1])
    assert len(told) == 6
    assert not found["equal"]
    assert found["first"]["step"] == 1
    ended = forge("train", "opened", "-s", "train.steps=2", fails=1)
    assert "opened: not repeated. The first difference is at step 2: " in ended.err
    assert "6 more in the pack were not repeated." in ended.err


def record(opened: Path, name: str, change: Any) -> None:
    """Change a file of an opened pack, and its hash."""
    import hashlib

    file, index = opened / name, json.loads((opened / "pack.json").read_text())
    file.write_text(json.dumps(change(json.loads(file.read_text()))), encoding="utf-8")
    content = file.read_bytes()
    index["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (opened / "pack.json").write_text(json.dumps(index), encoding="utf-8")


def test_another_number_of_processes_is_told(forge: Forge, folder: Path, packed: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(folder / "opened")
    index = json.loads((folder / "opened" / "pack.json").read_text())
    (folder / "opened" / "pack.json").write_text(json.dumps(index | {"world": 2}), encoding="utf-8")
    found = repeated(forge, "opened", "--nproc", "1")
    assert found["differences"] == [{"what": "processes", "packed": "2", "here": "1"}]


def test_a_machine_with_too_few_devices(
    forge: Forge, folder: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(folder / "opened")
    record(folder / "opened", "run/environment.json", lambda one: one | {"devices": ["A", "A"]})
    index = json.loads((folder / "opened" / "pack.json").read_text())
    (folder / "opened" / "pack.json").write_text(json.dumps(index | {"world": 2}), encoding="utf-8")
    monkeypatch.setattr("forge_train_tools.packing.repeat.cuda_devices", lambda: 1)
    ended = forge("train", "opened", fails=2)
    assert "the run had 2 processes, each with a device, and this machine has 1." in ended.err


def test_nothing_in_common_is_not_equal(forge: Forge, folder: Path, first: Path) -> None:
    (first / "metrics.jsonl").unlink()
    lines = (first / "events.jsonl").read_text().splitlines()
    (first / "events.jsonl").write_text("".join(f"{line}\n" for line in lines if '"evaluation"' not in line))
    forge("runs", "pack", "first")
    ended = forge("train", "first.zip", "-q", fails=1)
    assert "Nothing was compared" in ended.err


def test_data_that_is_gone(forge: Forge, folder: Path, first: Path) -> None:
    forge("runs", "pack", "first")
    (folder / "corpus.txt").rename(folder / "moved.txt")
    ended = forge("train", "first.zip", fails=2)
    assert "data of the run is not here: text.path = 'corpus.txt' (" in ended.err
    assert "-s text.path=PATH" in ended.err
    found = repeated(forge, "first.zip", "-s", "text.path=moved.txt")
    assert found["equal"]
    assert [row["what"] for row in found["differences"]] == ["text.path"]  # equal bytes under another name
    forge("runs", "pack", "first", "-o", "late.zip")
    (entry,) = index_of(folder / "late.zip")["data"]
    assert entry == {"key": "text.path", "value": "corpus.txt", "state": "missing"}


def test_a_plugin_that_is_not_installed(forge: Forge, folder: Path, packed: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(folder / "opened")
    more = {"name": "sparkle", "distribution": "forge-sparkle", "version": "2.1", "object": "sparkle:S", "hash": ""}
    record(folder / "opened", "run/plugins.json", lambda found: [*found, more])
    ended = forge("train", "opened", fails=2)
    assert "not installed here: 'sparkle' (forge-sparkle 2.1)" in ended.err
    assert "forge plugins install forge-sparkle==2.1" in ended.err


def test_other_commands_take_no_pack(forge: Forge, folder: Path, packed: Path) -> None:
    for words in (["plan"], ["verify"], ["config", "show"]):
        assert "first.zip is a pack of a run, which only `forge train` takes" in forge(*words, "first.zip", fails=2).err
    assert "--from begins another one" in forge("train", "first.zip", "--from", "runs/x", fails=2).err
    ended = forge("train", "first.zip", "-p", "lion", fails=2)
    assert "first.zip:" in ended.err
    assert "forge-repeat" not in ended.err  # the folder in which it was unpacked


@pytest.mark.slow
def test_a_run_that_began_elsewhere(forge: Forge, folder: Path, first: Path) -> None:
    """A pack holds no checkpoint of another run; one that is at its old place is taken."""
    start = "runs/first/checkpoints/step-00000003"
    forge("train", "tiny.toml", "--resume", start, "--name", "later", "-q")
    forge("runs", "pack", "later")
    assert repeated(forge, "later.zip")["equal"]
    (folder / "runs" / "first").rename(folder / "moved")
    assert f"the run continued {start}, which is not here" in forge("train", "later.zip", fails=2).err
    assert repeated(forge, "later.zip", "--resume", "moved/checkpoints/step-00000003")["equal"]


def test_weights_only_on_request(forge: Forge, folder: Path, first: Path) -> None:
    forge("runs", "pack", "first", "-o", "weights.zip", "--checkpoint")
    assert index_of(folder / "weights.zip")["checkpoint"] == "run/checkpoints/step-00000006"
    forge("runs", "pack", "first", "-o", "early", "--checkpoint", "3")
    forge("checkpoint", "verify", "early/run/checkpoints/step-00000003")
    assert repeated(forge, "early")["equal"]
    ended = forge("runs", "pack", "first", "-o", "none.zip", "--checkpoint", "5", fails=2)
    assert "no such whole checkpoint. There: step-00000006, step-00000003." in ended.err
    assert not (folder / "none.zip").exists()


COUNT = '''
from count_helper import WORD
from forge_train import Plugin, hookimpl, section

class Count(Plugin):
    """Counts steps."""
    api = (1, 0)

    @section
    class Config:
        api_key: str = ""

    @hookimpl
    def on_step(self, step):
        with open("steps.txt", "a") as out:
            print(WORD, step.step, file=out)
'''


@pytest.mark.slow
def test_a_plugin_from_a_file_and_a_secret(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code travels with the pack, and runs only if the user names it; the secret does not travel."""
    (folder / "mine").mkdir()
    (folder / "mine" / "count.py").write_text(COUNT, encoding="utf-8")
    (folder / "mine" / "count_helper.py").write_text("WORD = 'step'\n", encoding="utf-8")
    monkeypatch.setenv("FORGE_SET", "count.api_key=sesame-opens-42")
    forge("train", "tiny.toml", "-p", "mine/count.py", "--name", "first", "-q")
    monkeypatch.delenv("FORGE_SET")
    forge("runs", "pack", "first", "-o", "opened")
    files = {file.relative_to(folder / "opened").as_posix() for file in (folder / "opened").rglob("*.py")}
    assert files == {"sources/count/count.py", "sources/count/count_helper.py"}
    assert not any(b"sesame" in file.read_bytes() for file in (folder / "opened").rglob("*") if file.is_file())
    assert "count.api_key is a secret, which is not packed" in forge("train", "opened", fails=2).err
    secret = ("-s", "count.api_key=sesame")
    assert repeated(forge, "opened", *secret)["equal"]  # the file is here, unchanged
    shutil.rmtree(folder / "mine")
    fingerprint.cache_clear()
    steps = (folder / "steps.txt").read_text()
    ended = forge("train", "opened", *secret, fails=2)
    assert "plugin 'count' is code that came with the pack (sources/count/count.py), and none of it is run" in ended.err
    assert (folder / "steps.txt").read_text() == steps
    found = repeated(forge, "opened", *secret, "-p", "opened/sources/count/count.py")
    assert found["equal"]
    assert found["differences"] == []
    assert (folder / "steps.txt").read_text() == steps + "".join(f"step {at}\n" for at in range(1, 7))


def linked(name: str) -> zipfile.ZipInfo:
    found = zipfile.ZipInfo(name)
    found.create_system, found.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return found


@pytest.mark.parametrize(
    ("change", "extra", "said"),
    [
        ({}, {"../out.txt": b"x"}, "'../out.txt' leads out of it"),
        ({}, {"/tmp/out.txt": b"x"}, "'/tmp/out.txt' leads out of it"),
        ({}, {"run\\..\\..\\out.txt": b"x"}, "leads out of it"),
        ({}, {linked("run/link"): b"/etc/passwd"}, "'run/link' leads out of it, or is no file"),
        ({}, {"run/more.pkl": b"x"}, "run/more.pkl was put in after it was packed"),
        ({"run/config.toml": b"[run]\nseed = 1\n"}, {}, "run/config.toml is not as it was packed"),
        ({"run/metrics.jsonl": None}, {}, "run/metrics.jsonl is missing"),
        ({"pack.json": None}, {}, "it has no pack.json"),
        ({"pack.json": b"[]"}, {}, "in pack.json, it is a list"),
        ({"pack.json": b'{"format": 99}'}, {}, "was packed by a newer forge"),
    ],
)
def test_a_zip_that_was_tampered_with(
    forge: Forge, folder: Path, packed: Path, change: dict[str, Any], extra: dict[Any, bytes], said: str
) -> None:
    rewritten(packed, change, extra)
    before = sorted(folder.rglob("*"))
    ended = forge("train", "other.zip", fails=2)
    assert said in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert sorted(folder.rglob("*")) == before


def test_a_zip_that_is_none(forge: Forge, folder: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    assert "first.zip is no whole zip" in forge("train", "first.zip", fails=2).err
    at = whole.index(b"run/config.toml") + 200
    packed.write_bytes(whole[:at] + bytes(byte ^ 0xFF for byte in whole[at : at + 20]) + whole[at + 20 :])
    assert "first.zip is no whole zip" in forge("train", "first.zip", fails=2).err
    assert "There is no lost.zip" in forge("train", "lost.zip", fails=2).err
    packed.write_bytes(whole)
    monkeypatch.setattr("forge_train_tools.packing.archive.MOST_BYTES", 5000)  # of what a bomb would unpack to
    assert "at most 4.88 KiB are read" in forge("train", "first.zip", fails=2).err


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks(forge: Forge, folder: Path) -> None:
    forge(
        "train",
        "tiny.toml",
        "-s",
        "train.global_batch=4",
        *("-s", "train.steps=3"),
        "--nproc",
        "2",
        "--name",
        "first",
        "-q",
    )
    forge("runs", "pack", "first")
    found = repeated(forge, "first.zip")
    assert found["equal"]
    assert found["differences"] == []

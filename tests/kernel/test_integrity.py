"""Damage and ill will: a checkpoint is verified before anything uses it, and reading it runs nothing that is in it."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_models
import toys
from forge_cli import Ended, forge
from forge_train import ConfigError, DivergedError, Plugin, Update, hookimpl
from forge_train.checkpoint import checkpoint, seal
from tiny_models import flip, reseal

pytestmark = pytest.mark.unit
STEP = "step-00000003"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of its own for each test."""
    return shutil.copytree(trained, tmp_path / "run")


def weights(path: Path) -> Path:
    return next(path.glob("rank-*.safetensors"))


# -- damage ---------------------------------------------------------------------------------------


def readers(path: Path, out: Path) -> dict[str, Callable[[], Ended]]:
    """Every command that uses a checkpoint's contents."""
    config = path / "config.toml"
    return {
        "inspect": lambda: forge("checkpoint", "inspect", path),
        "verify": lambda: forge("checkpoint", "verify", path),
        "export": lambda: forge("checkpoint", "export", path, out / "hf"),
        "generate": lambda: forge("generate", path, "--tokens", "2"),
        "init_from": lambda: forge(
            *("train", config, "--run-dir", out, "--name", "new", "-q", "-s", f"train.init_from={path}")
        ),
        "resume": lambda: forge(
            *("train", config, "--run-dir", out, "--name", "new", "-q", "--resume", path, "-s", "train.steps=5")
        ),
    }


READERS = ("inspect", "verify", "export", "generate", "init_from", "resume")


@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_bit_is_found_by_everything_that_reads_a_checkpoint(run: Path, tmp_path: Path, reader: str) -> None:
    path = run / "checkpoints" / STEP
    flip(weights(path))
    ended = readers(path, tmp_path / "out")[reader]()
    assert ended.code == (1 if reader == "verify" else 2)
    assert "rank-00000-0.safetensors has other contents than were saved" in ended.out + ended.err
    assert "Traceback" not in ended.out + ended.err
    if reader != "verify":
        assert f"Name the run instead, which takes its newest whole one: {run}" in ended.err
    assert not (tmp_path / "out" / "hf").exists()
    assert not (tmp_path / "out" / "new").exists()


def test_a_damaged_newest_checkpoint_is_left_out_and_the_run_goes_on_from_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"checkpoint.every": 2, "checkpoint.keep": 3}
    through = toys.run(tmp_path, toys.Noise, name="through", steps=8, config=config)
    old = toys.run(tmp_path, toys.Noise, name="old", steps=8, config=config, stop_at=6)
    flip(weights(old.run / "checkpoints" / "step-00000006"))
    with caplog.at_level(logging.WARNING):
        resumed = toys.run(tmp_path, toys.Noise, name="old", steps=8, config=config)
    assert "step-00000006 is not whole (rank-00000-0.safetensors has other contents than were saved)" in caplog.text
    assert [event["step"] for event in resumed.events if event["event"] == "resumed"] == [4]
    assert resumed.numbers == through.numbers


def test_each_file_is_read_once_at_resume_and_not_again_for_pruning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"checkpoint.every": 1, "checkpoint.keep": 2}
    toys.run(tmp_path, name="run", steps=9, config=config, stop_at=3)
    monkeypatch.setattr(seal, "_verified", {})  # as in a new process
    read: list[str] = []
    real = seal._hashes

    def hashes(path: Path, sizes: Any, *arguments: Any, **more: Any) -> Any:
        read.append(path.name)
        return real(path, sizes, *arguments, **more)

    monkeypatch.setattr(seal, "_hashes", hashes)
    toys.run(tmp_path, name="run", steps=9, config=config, stop_at=5)
    save = [f".step-0000000{step}.partial" for step in (4, 4, 5, 5)]  # to seal it, and to read it back
    assert read == ["step-00000003", *save]


def test_pruning_never_gives_up_a_whole_checkpoint_for_a_damaged_one(tmp_path: Path) -> None:
    class Rots(Plugin):
        """Damages what was saved at step 2."""

        @hookimpl
        def on_checkpoint(self, event: Any) -> None:
            if (event.kind, event.step) == ("saved", 2):
                flip(weights(event.path))

    run = toys.run(tmp_path, Rots, name="run", steps=3, config={"checkpoint.every": 1, "checkpoint.keep": 2}).run
    assert [saved.step for saved in checkpoint.found(run / "checkpoints")] == [3, 2, 1]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_diverged_run_names_the_checkpoint_that_it_verified(tmp_path: Path, damaged: bool) -> None:
    class Diverges(Plugin):
        @hookimpl
        def on_gradients(self, update: Update) -> None:
            update.grad_norm.fill_(float("nan")) if update.step == 3 else None

        @hookimpl
        def on_checkpoint(self, event: Any) -> None:
            if damaged and event.kind == "saved":
                flip(weights(event.path))

    with pytest.raises(DivergedError) as caught:
        toys.run(tmp_path, Diverges, name="run", steps=4, config={"checkpoint.every": 2})
    expected = "There is no whole checkpoint from before it" if damaged else "step-00000002, from before it, is whole"
    assert expected in str(caught.value)


# -- ill will -------------------------------------------------------------------------------------


class Touches:
    """What runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def poison(path: Path, victim: Path) -> None:
    """Put a command where torch's own checkpoints have a pickle, and into the index; and seal it again."""
    for name in (".metadata", "tensors.json"):
        (path / name).write_bytes(pickle.dumps(Touches(victim)))
    reseal(path)


@pytest.mark.parametrize("reader", READERS)
def test_nothing_in_a_checkpoint_is_run(run: Path, tmp_path: Path, reader: str) -> None:
    path, victim = run / "checkpoints" / STEP, tmp_path / "run-by-pickle"
    poison(path, victim)
    pickle.loads((path / "tensors.json").read_bytes())
    assert victim.exists(), "the file is hostile"
    victim.unlink()
    ended = readers(path, tmp_path / "out")[reader]()
    assert not victim.exists()
    assert ended.code == (1 if reader == "verify" else 2)
    said = ended.out + ended.err
    assert "tensors.json: not an index of tensors" in said
    assert str(path) in said
    assert "Traceback" not in said


EVIL = """
from pathlib import Path
from forge_train import Plugin
Path({victim!r}).touch()
class Evil(Plugin):
    \"\"\"Runs when it is imported.\"\"\"
    api = (1, 0)
"""


@pytest.mark.parametrize("spec", ["./evil.py", "evil.py:Evil", "{path}/evil.py", "../evil.py", "downloaded.evil:Evil"])
def test_code_that_came_with_a_checkpoint_is_not_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    path, victim = tmp_path / "downloaded", tmp_path / "run-by-import"
    shutil.copytree(run / "checkpoints" / STEP, path)
    for file in (path / "evil.py", tmp_path / "evil.py"):
        file.write_text(EVIL.format(victim=str(victim)))
    config = path / "config.toml"
    spec = spec.format(path=path)
    lines = [line for line in config.read_text().splitlines() if not line.startswith("plugins =")]
    config.write_text("\n".join([f'plugins = ["{spec}"]', *lines]))
    state = json.loads((path / "state.json").read_text())
    state["enabled"].append({**state["enabled"][0], "name": "evil"})
    (path / "state.json").write_text(json.dumps(state))
    reseal(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    commands = {
        "generate": ("generate", path, "--tokens", "1"),
        "export": ("checkpoint", "export", path, tmp_path / "hf"),
        "eval": ("eval", path),
        "inspect": ("checkpoint", "inspect", path),
        "diff": ("checkpoint", "diff", path, run),
        "resume": ("train", "--run-dir", tmp_path / "runs", "-q", "--resume", path, "-s", "train.steps=5"),
    }
    for name, command in commands.items():
        ended = forge(*command)
        assert not victim.exists(), name
        if name not in ("inspect", "diff"):  # which need no plugin
            assert ended.code == 2, name
            assert f"{spec!r} came with this folder, and no code of it is run" in ended.err
        assert "Traceback" not in ended.out + ended.err
    forge("train", config, "--run-dir", tmp_path / "runs", "-q")
    assert victim.exists(), "a configuration that somebody names is theirs"


def test_a_checkpoint_that_has_another_step_s_name_is_not_whole(run: Path, tmp_path: Path) -> None:
    """Else an older state would be resumed as the newest, or steps be counted twice."""
    latest = run / "checkpoints" / STEP
    renamed = shutil.copytree(latest, run / "checkpoints" / "step-00000099")
    for reader in READERS:
        ended = readers(renamed, tmp_path / reader)[reader]()
        assert "it is of step 3, whatever its name says" in ended.out + ended.err
    assert checkpoint.newest(run / "checkpoints").path == latest  # type: ignore[union-attr]
    assert not seal.check(latest.rename(run / "kept"))  # a name that says nothing is anybody's choice


def test_the_list_of_checkpoints_survives_a_damaged_latest(run: Path) -> None:
    (run / "checkpoints" / "latest").write_bytes(b"\xff\xfe")
    assert STEP in forge("checkpoint", "list", run).out


def test_a_manifest_names_only_files_of_its_folder(run: Path, tmp_path: Path) -> None:
    path = run / "checkpoints" / STEP
    manifest = json.loads((path / "manifest.json").read_text())
    (tmp_path / "elsewhere").write_text("x")
    manifest["files"]["../../../elsewhere"] = {"bytes": 1, manifest["hash"]: "0"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ConfigError, match=r"manifest\.json names '\.\./\.\./\.\./elsewhere', which is not in this folder"
    ):
        checkpoint.resolve(path)


# -- moved and edited -----------------------------------------------------------------------------


def test_a_checkpoint_is_used_where_it_was_moved_to_and_with_an_edited_configuration(run: Path, tmp_path: Path) -> None:
    path = (run / "checkpoints" / STEP).rename(tmp_path / "moved")
    shutil.rmtree(run)
    config = path / "config.toml"
    config.write_text(f"# mine now\n{config.read_text()}")
    assert forge("checkpoint", "verify", path).out == (
        f"{path}: whole (config.toml was edited since it was saved, as it may be)\n"
    )
    assert forge("checkpoint", "verify", path, "--json").json == [
        {"path": str(path), "problem": "", "edited": ["config.toml"]}
    ]
    for name, reader in readers(path, tmp_path / "out").items():
        ended = reader()
        assert ended.code == 0, f"{name}: {ended.err}"
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    config.write_text(config.read_text().replace("dim = 32", "dim = 16"))
    assert "holds another model" in forge("generate", path).err
    config.write_text("[")
    assert f"{config}:" in forge("generate", path).err
    config.unlink()
    assert "config.toml is missing" in forge("generate", path).err


def test_nothing_in_a_checkpoint_says_where_it_lay(run: Path) -> None:
    path = run / "checkpoints" / STEP
    found = [file.name for file in path.rglob("*") if file.is_file() and str(run).encode() in file.read_bytes()]
    assert found == []

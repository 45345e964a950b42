"""A resume that fails leaves the run as it was, and a base that was moved is named where the advice says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import chat_model
from forge_cli import forge, one_message

pytest.importorskip("transformers")
pytestmark = pytest.mark.e2e

SMALL = {
    "FORGE_SET": "run.device=cpu;train.global_batch=4;train.sequence=32;train.evaluate_every=0;sft.held_out=0;"
    "sft.path=chats.jsonl"
}
RUN = Path("runs/tuned")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of adapters, `runs/tuned`, and its base in `runs/imported`."""
    folder = tmp_path_factory.mktemp("resumes")
    chat_model.write_model(folder / "hf")
    chat_model.write_chats(folder / "chats.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("train", "hf", "-p", "lora,sft", "-s", "train.steps=2", "--name", "tuned", environment=SMALL)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with the run of its own."""
    shutil.copytree(made / "runs" / "tuned", tmp_path / "runs" / "tuned")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").symlink_to(made / "chats.jsonl")
    return tmp_path


@pytest.fixture
def moved(made: Path, place: Path) -> Any:
    """The base of the run in a place that it does not know."""
    (base,) = (one.parent for one in (made / "runs" / "imported").glob("*/tensors.json"))
    base.rename(place / "base")
    yield place / "base"
    (place / "base").rename(base)


def run(*words: Any, environment: dict[str, str] | None = None) -> str:
    ended = forge(*words, environment=environment or {})
    assert ended.code == 0, ended.err
    return ended.out + ended.err


def content() -> dict[str, bytes]:
    """What a resume reads of the run's folder."""
    names = ["config.toml", "plugins.json", "outcome.json", *(RUN / "tokenizer").iterdir()]
    return {str(one): (RUN / one if isinstance(one, str) else one).read_bytes() for one in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("train.init_from=nowhere",),
        ("train.init_from=nowhere", "--nproc", "2"),
        ("train.init_from=nowhere", "sft.template=chatml", "checkpoint.allow_changes=sft"),
        ('tokenizer.add=["<x>"]', 'checkpoint.allow_changes=["tokenizer"]'),
    ],
)
def test_a_failed_resume_changes_nothing_that_the_next_one_reads(place: Path, settings: tuple[str, ...]) -> None:
    before = content()
    words = [word for one in settings for word in (("-s", one) if "=" in one else (one,))]
    assert forge("train", "--resume", RUN, "-s", "train.steps=4", *words).code == 2
    assert content() == before
    run("train", "--resume", RUN, "-s", "train.steps=3")
    assert content()["config.toml"] != before["config.toml"]


REFUSING = """
from forge_train import ConfigError, Plugin, hookimpl

class Refusing(Plugin):
    \"""Refuses what was loaded.\"""
    api = (1, 0)

    @hookimpl
    def on_checkpoint(self, event):
        if event.kind == "loaded":
            raise ConfigError("not this one")
"""


def test_a_resume_that_is_refused_late_keeps_metrics_of_steps_after_the_checkpoint(place: Path) -> None:
    """A killed run may have logged some."""
    file = RUN / "metrics.jsonl"
    last = file.read_text(encoding="utf-8").splitlines()[-1]
    with file.open("a", encoding="utf-8") as out:
        out.write(f"{json.dumps({**json.loads(last), 'step': 3})}\n")
    before, events = file.read_bytes(), (RUN / "events.jsonl").read_bytes()
    Path("refusing.py").write_text(REFUSING, encoding="utf-8")
    allowed = ("-s", 'checkpoint.allow_changes=["refusing"]')
    refused = forge("train", "--resume", RUN, "-p", "./refusing.py", *allowed, "-s", "train.steps=3")
    assert "not this one" in one_message(refused, 2)
    assert file.read_bytes() == before
    assert (RUN / "events.jsonl").read_bytes() == events
    run("train", "--resume", RUN, "-s", "train.steps=3")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines].count(3) == 1
    assert lines[-1]["loss"] != json.loads(last)["loss"]


@pytest.mark.slow
def test_a_base_that_was_moved_is_named(place: Path, moved: Path) -> None:
    said = one_message(forge("train", "--resume", RUN, "-s", "train.steps=3"), 2)
    assert "Name a copy of it with train.init_from" in said
    named = ("-s", f"train.init_from={moved}")
    run("train", "--resume", RUN, "-s", "train.steps=3", *named)
    run("train", "--resume", RUN, "-s", "train.steps=4")  # which knows the new place by now


@pytest.mark.slow
def test_a_base_that_was_moved_is_named_to_whoever_reads_the_run(place: Path, moved: Path) -> None:
    named = ("-s", f"train.init_from={moved}")
    commands: tuple[tuple[str, ...], ...] = (
        ("generate", str(RUN), "--prompt", "say", "--tokens", "3"),
        ("checkpoint", "export", str(RUN), "merged"),
        ("checkpoint", "export", str(RUN), "shared", "--nproc", "2"),
        ("checkpoint", "export", str(RUN), "adapter", "--adapter"),
    )
    for words in commands:
        assert "Name a copy of it with train.init_from" in one_message(forge(*words), 2)
        run(*words, *named)
    assert Path("merged/model.safetensors").read_bytes() == Path("shared/model.safetensors").read_bytes()
    assert one_message(forge(*commands[0], "-s", "train"), 2).startswith("--set 'train': expected key=value")

"""A modality in a package written from the pages alone: sounds, beside the images that Forge has."""

from __future__ import annotations

import json
import math
import os
import struct
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest

import forge_cli
from forge_cli import Ended
from forge_train.run import records
from packages import install

pytestmark = [pytest.mark.dist, pytest.mark.e2e]

RATE = 4000
CONFIG = f"""\
[multimodal]
path = "sounds.jsonl"
held_out = 0.25
[sounds]
rate = {RATE}
frame = 200
bands = 12
dim = 16
layers = 1
heads = 2
[adamw]
lr = 0.01
{forge_cli.DECODER.replace("sequence = 16", "sequence = 32", 1)}"""
TONES = {"low": 300, "high": 1500}
TRAIN = ("train", "mine.toml", "-p", "sounds,multimodal")


def tone(path: Path, frequency: float, samples: int, channels: int = 1) -> None:
    values = [round(9000 * math.sin(2 * math.pi * frequency * at / RATE)) for at in range(samples)]
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, RATE, 0, "NONE", ""))
        file.writeframes(b"".join(struct.pack("<h", value) * channels for value in values))


@pytest.fixture(scope="module", autouse=True)
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to work in, with sounds and texts; the package is installed in this process and those that it starts."""
    folder = tmp_path_factory.mktemp("desk")
    install(folder / "site", "forge_sounds")
    (folder / "mine.toml").write_text(CONFIG, encoding="utf-8")
    with (folder / "sounds.jsonl").open("w", encoding="utf-8") as file:
        for number in range(24):
            name, frequency = list(TONES.items())[number % 2]
            tone(folder / f"{number}.wav", frequency + number, 500 + 100 * (number % 5), 1 + number % 3 // 2)
            file.write(json.dumps({"text": f"<sound> {name}", "sounds": [f"{number}.wav"]}) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "site"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), forge_cli.environment()["PYTHONPATH"]]))
        patch.chdir(folder)
        yield folder


def forge(*arguments: object, code: int = 0) -> Ended:
    done = forge_cli.forge(*arguments)
    assert done.code == code, done.out + done.err
    return done


def losses(run: str) -> list[float]:
    return [line["loss"] for line in records.read(Path("runs", run, "metrics.jsonl"))]


@pytest.fixture(scope="module")
def heard(desk: Path) -> str:
    """A run on one process that learns to tell tones."""
    forge(*TRAIN, "--name", "heard", "-s", "train.steps=100")
    return "heard"


def test_it_conforms() -> None:
    (report,) = forge("plugins", "check", "sounds", "--json").json["plugins"]
    assert not [check for check in report["checks"] if check["status"] == "fail"]


def test_two_ranks_train_as_one_process_does() -> None:
    forge(*TRAIN, "--name", "one")
    forge(*TRAIN, "--name", "two", "--nproc", 2)
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)
    assert forge("verify", *TRAIN[1:], "--nproc", 2, "--steps", 2, "--json").json["agree"]


def test_an_answer_follows_from_the_sound(heard: str) -> None:
    asked = [{"prompt": "<sound> ", "sounds": [f"{number}.wav"]} for number in range(4)]
    Path("asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked), encoding="utf-8")
    forge("generate", f"runs/{heard}", "--from-file", "asked.jsonl", "--out", "answers.jsonl", "--tokens", 4,
          "--temperature", 0)  # fmt: skip
    answers = [line["text"] for line in records.read(Path("answers.jsonl"))]
    assert [answer[0] for answer in answers] == ["l", "h", "l", "h"]


def test_a_sound_that_cannot_be_read_is_refused_by_name(heard: str) -> None:
    Path("none.wav").write_bytes(b"no sound")
    Path("none.jsonl").write_text(json.dumps({"prompt": "<sound> ", "sounds": ["none.wav"]}) + "\n", encoding="utf-8")
    said = forge("generate", f"runs/{heard}", "--from-file", "none.jsonl", "--out", "not.jsonl", code=2).err
    assert "none.jsonl" in said
    assert "none.wav" in said

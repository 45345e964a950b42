"""Odd names and values on the command line: kept as they are or refused, never changed, and never repeated whole."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from forge_command import Forge
from forge_train import ConfigError
from forge_train.base.errors import shortened
from forge_train_tools.launchers.job import ClusterJob, Machines
from forge_train_tools.launchers.slurm import Slurm, SlurmOptions

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("value", ['a"b', "a#b", "a\\b", "it's", "two words", 'all "of" #it\\', "plain", "a=b", "a$b"])
def test_a_line_of_sbatch_says_the_value(value: str) -> None:
    job = ClusterJob("run", Machines(time="1:00:00"), ["train"], Path("/x"), Path("/x/runs"))
    (text,) = Slurm(SlurmOptions(sbatch={"comment": value})).files(job).values()
    (line,) = [line for line in text.splitlines() if line.startswith("#SBATCH --comment")]
    assert shlex.split(line.removeprefix("#SBATCH "), comments=True) == [f"--comment={value}"]


@pytest.mark.parametrize("name", [" ", "", "a\r", " a", "a ", "a\n", "a\x00b", "a\x1b[0m"])
@pytest.mark.parametrize("command", [("train",), ("launch", "slurm", "--nproc", "1", "--time", "1:00:00")])
def test_a_name_is_never_another_one(forge: Forge, folder: Path, name: str, command: tuple[str, ...]) -> None:
    ended = forge(*command, "tiny.toml", "--name", name, fails=2)
    assert "expected a name of printable characters" in ended.err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("value", ["\r", " ", "a\r"])
def test_a_setting_of_a_name_is_none_either(forge: Forge, value: str) -> None:
    forge("train", "tiny.toml", "-s", f"run.name={value}", fails=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("-s", "train.precision=LONG"),
        ("-s", "train.steps=LONG"),
        ("-s", "train.steps=9DIGITS"),
        ("-s", "LONG=1"),
        ("-s", "LONG"),
        ("-p", "LONG"),
        ("--name", "LONG"),
        ("--nproc", "LONG"),
        ("-s", "decoder.LONG=1"),
        ("-s", "train.precision=WORDS"),
    ],
    ids=str,
)
def test_a_long_value_is_not_repeated(forge: Forge, arguments: tuple[str, ...]) -> None:
    long = {"LONG": "x" * 6000, "9DIGITS": "9" * 4000, "WORDS": "a b " * 1500}
    typed = [next((one.replace(key, text) for key, text in long.items() if key in one), one) for one in arguments]
    assert len(forge("train", "tiny.toml", *typed, fails=2).err) < 1200


def test_what_is_short_stays() -> None:
    text = "x.toml:3: decoder.dim: expected 'a' or 'b', found 'c'. It can't; " + "a sentence of words, " * 40
    assert shortened(text) == text
    assert shortened("'" + "a" * 600 + "'").endswith("(602 characters)")


@pytest.mark.parametrize("key", ["decoder.dim", "decoder.vocabulary", "decoder.hidden"])
def test_a_size_beyond_every_machine_is_named(forge: Forge, key: str) -> None:
    found = forge("plan", "tiny.toml", "-s", f"{key}={2**60}", fails=2).err
    assert f"{key}: {2**60:,} is too large" in found


def test_a_job_has_a_printable_name() -> None:
    with pytest.raises(ConfigError, match="printable"):
        ClusterJob("a\nb", Machines(), ["train"], Path("/x"), Path("/x/runs"))

"""`forge config`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from forge_command import Forge


def test_show_tells_where_values_come_from(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_SET", "log.every=2")
    shown = forge("config", "show", "tiny.toml", "-p", "lion", "-s", "decoder.rope.theta=500", "--json").json
    assert shown["train.steps"] == {"value": 6, "origin": "tiny.toml:2"}
    assert shown["log.every"] == {"value": 2, "origin": "FORGE_SET"}
    assert shown["decoder.rope.theta"] == {"value": 500.0, "origin": "--set decoder.rope.theta=500"}
    assert shown["train.sequence"]["value"] == 16
    assert shown["lion.lr"]["origin"] == "default"
    assert "lion" in shown["plugins"]["value"]
    assert shown["defaults.attention"]["origin"].startswith("base.toml:")
    assert "adamw.lr" not in shown


def test_show_as_a_table(forge: Forge) -> None:
    lines = forge("config", "show", "tiny.toml").out.splitlines()
    (line,) = [line for line in lines if line.startswith("train.steps ")]
    assert line.split() == ["train.steps", "6", "tiny.toml:2"]


@pytest.mark.parametrize("missing", ["text.path=", "text.path=nowhere"])
def test_only_training_needs_the_data(forge: Forge, missing: str) -> None:
    asked = ("tiny.toml", "-s", missing, "-s", "train.init_from=base")
    assert forge("config", "show", *asked, "--json").json["text.path"]["value"] == missing.removeprefix("text.path=")
    assert "init_from" in forge("config", "init", *asked).out
    assert forge("plan", *asked, "--json").json["parameters"]
    assert "text.path" in forge("train", *asked, fails=2).err


def test_show_without_a_name_is_the_preset(forge: Forge) -> None:
    assert forge("config", "show", "--json").json["train.steps"]["origin"].startswith("quickstart.toml:")


def test_what_init_writes_trains(forge: Forge, folder: Path) -> None:
    written = forge("config", "init", "tiny.toml", "-p", "lion", "-s", "lion.lr=0.002", "-o", "my.toml")
    assert "forge train my.toml" in written.out
    text = (folder / "my.toml").read_text(encoding="utf-8")
    parsed = tomllib.loads(text)
    assert "lion" in parsed["plugins"]
    assert parsed["lion"]["lr"] == 0.002
    assert "# Peak learning rate" in text
    assert "# integer > 0" in text
    assert "# Base of the frequencies." in text
    done = forge("train", "my.toml", "--json")
    assert done.json["step"] == 6
    same = forge("train", "tiny.toml", "-p", "lion", "-s", "lion.lr=0.002", "--json")
    assert done.json["loss"] == same.json["loss"]


def test_init_writes_to_stdout(forge: Forge) -> None:
    assert tomllib.loads(forge("config", "init", "tiny.toml").out)["train"]["steps"] == 6


def test_init_overwrites_nothing(forge: Forge, folder: Path) -> None:
    before = (folder / "tiny.toml").read_text()
    assert "tiny.toml: exists already" in forge("config", "init", "-o", "tiny.toml", fails=2).err
    assert (folder / "tiny.toml").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "tiny.toml", "-s", "adamw.lr=fast"], "expected a number"),
        (["show", "tiny.toml", "-p", "nope"], "no plugin named 'nope'"),
        (["init", "-o", "missing/my.toml"], "can't be written"),
        (["show", "tiny.toml", "--svg", "missing/lr.svg"], "missing/lr.svg: can't be written"),
        (
            ["show", "tiny.toml", "-p", "wsd", "-s", "wsd.decay=7", "--plot"],
            "a decay of 7 do not fit into the run's 6 steps",
        ),
        (["init", "nope"], "no preset 'nope'"),
        (["shwo"], "Did you mean 'show'?"),
    ],
)
def test_mistakes(forge: Forge, arguments: list[str], says: str) -> None:
    assert says in forge("config", *arguments, fails=2).err


def test_the_schedule_is_drawn(forge: Forge, folder: Path) -> None:
    asked = ("config", "show", "tiny.toml", "-p", "linear", "-s", "linear.floor=0.5", "-s", "train.steps=3")
    title, *lines, axis = forge(*asked, "--plot").out.splitlines()
    assert title == "Learning rate by linear, as a share of its peak"
    bars = [*["█  "] * 2, *["██ "] * 2, *["███"] * 8]
    assert [line[8:] for line in lines] == bars, "1, 5/6 and 4/6 of twelve lines"
    assert (lines[0][:8], lines[11][:8]) == ("     1 ▕", "     0 ▕")
    assert axis.split() == ["1", "3", "steps"]
    assert forge(*asked, "--svg", "lr.svg").out == "Wrote lr.svg.\n"
    picture = ElementTree.fromstring((folder / "lr.svg").read_text(encoding="utf-8"))
    (line,) = picture.iter("{http://www.w3.org/2000/svg}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert len(heights) == 3
    assert heights == sorted(heights), "down the page"

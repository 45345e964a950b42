"""`forge runs report`: one page that is whole, for one run and for many. It is parsed strictly."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from forge_command import Forge
from forge_train_cli.curves import HEIGHT, WIDTH, Curve, chart

VOID = {"meta", "line", "circle", "polyline"}
"""HTML's own, and what is written as `<line/>` in SVG."""


class Strict(HTMLParser):
    """Fails on a tag that is not closed, or closed twice; keeps what a browser would ask for and draw."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.numbers: list[tuple[str, float]] = []
        self.asked: list[str] = []
        self.count: dict[str, int] = {}
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)
        for key, value in attrs:
            if key in ("src", "href", "srcset", "action", "data", "xlink:href"):
                self.asked.append(f"{tag} {key}={value}")
            if key == "points":
                for x, y in (pair.split(",") for pair in (value or "").split()):
                    self.numbers += [("x", float(x)), ("y", float(y))]
            elif key in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy"):
                self.numbers.append((key[-2 if key[-1].isdigit() else -1], float(value or "nan")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, tag
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.said.append(data)


def check(text: str) -> Strict:
    page = Strict(text)
    assert page.asked == []
    assert not re.search(r"url\(|@import|https?://|<script|<iframe|<img", text)
    assert page.numbers
    for axis, number in page.numbers:
        assert math.isfinite(number)
        assert 0 <= number <= (WIDTH if axis == "x" else HEIGHT), (axis, number)
    return page


@pytest.fixture
def first(forge: Forge, folder: Path) -> Path:
    forge("train", "tiny.toml", "--name", "first", "-q")
    return folder / "runs" / "first"


def test_one_run_and_several(forge: Forge, folder: Path, first: Path) -> None:
    forge("runs", "report", "first")
    alone = check((folder / "report.html").read_text(encoding="utf-8"))
    assert alone.count["svg"] == 5
    assert "Where their configurations differ" not in " ".join(alone.said)
    forge("train", "tiny.toml", "--name", "lion", "-p", "lion", "-s", "lion.lr=0.002", "-q")
    assert forge("runs", "report", "runs/first", "lion", "-o", "both.html").out == "both.html: 2 runs\n"
    both = check((folder / "both.html").read_text(encoding="utf-8"))
    said = " ".join(both.said)
    for expected in ("2 runs", "lion.lr", "0.002", "done", "Gradient norm, logarithmic", "torch ", "lion (forge-train"):
        assert expected in said, expected
    assert both.count["polyline"] == 2 * both.count["svg"]


def test_many_runs_and_what_is_hostile(forge: Forge, folder: Path, first: Path) -> None:
    """Names and values are text; a loss that is no number breaks its curve; a run of one step is a dot."""
    for number in range(24):
        copy = first.with_name(f"<b>run & {number}")
        shutil.copytree(first, copy)
        config = copy / "config.toml"
        config.write_text(config.read_text(encoding="utf-8").replace('"corpus.txt"', f'"<script>{number}</script>"'))
    lines = [json.loads(line) for line in (first / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines[2] |= {"loss": None, "grad_norm": None, "not_finite": {"loss": "nan", "grad_norm": "inf"}}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (first / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n", encoding="utf-8")
    (first / "outcome.json").unlink()
    names = sorted(path.name for path in first.parent.iterdir())
    forge("runs", "report", *names, "-o", "many.html")
    page = check((folder / "many.html").read_text(encoding="utf-8"))
    said = " ".join(page.said)
    assert "25 runs" in said
    assert "<b>run & 23" in said
    assert "<script>7</script>" in said
    assert "unfinished" in said
    assert page.count["circle"] >= 4, "the run of one step"
    assert page.count.get("script") is None


def test_a_page_for_light_and_dark(forge: Forge, folder: Path, first: Path) -> None:
    forge("runs", "report", "first", "-o", "page.html")
    text = (folder / "page.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in text
    assert "default-src 'none'" in text


def test_answers_that_a_run_kept(forge: Forge, folder: Path, first: Path) -> None:
    """As text, the newest of them, without a line that was cut off."""
    (first / "artifacts").mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": f"<b>{at}", "reward": at / 2}) for at in range(100)]
    (first / "artifacts" / "samples.jsonl").write_text("\n".join([*lines, '{"prompt": "cut']), encoding="utf-8")
    forge("runs", "report", "first", "-o", "answers.html")
    said = check((folder / "answers.html").read_text(encoding="utf-8")).said
    assert {"Samples", "prompt", "reward", "<b>99", "49.5", "<b>60"} <= {*said}
    assert "<b>59" not in said


@pytest.mark.parametrize(
    "values", [[], [math.nan], [5.0], [0.0, 0.0], [-1e30, 1e30], [1e-300, 2e-300], [math.inf, 1.0]]
)
@pytest.mark.parametrize("logarithmic", [False, True])
def test_curves_of_odd_values(values: list[float], logarithmic: bool) -> None:
    text = chart("odd", [Curve(0, "run", list(enumerate(values)))], logarithmic=logarithmic)
    for _, number in Strict(text).numbers:
        assert math.isfinite(number)


def test_long_curves_are_thinned() -> None:
    text = chart("long", [Curve(0, "run", [(float(n), float(n % 7)) for n in range(100_000)])])
    assert len(text) < 20_000


def test_mistakes(forge: Forge, folder: Path, first: Path) -> None:
    assert "there is no such run" in forge("runs", "report", "absent", fails=2).err
    assert "can't be written" in forge("runs", "report", "first", "-o", "no/such/folder.html", fails=2).err


def test_nothing_but_a_page_is_overwritten(forge: Forge, folder: Path, first: Path) -> None:
    notes = folder / "notes.html"
    notes.write_text("<!DOCTYPE html><html><head><title>Mine</title></head></html>", encoding="utf-8")
    for command in (("runs", "report", "first", "--out"), ("data", "inspect", "corpus.txt", "--html")):
        refused = forge(*command, "notes.html", fails=2).err
        assert "notes.html exists and is not a page written by forge; choose another name" in refused
        assert "Mine" in notes.read_text(encoding="utf-8")
        for _ in range(2):
            forge(*command, "page.html")

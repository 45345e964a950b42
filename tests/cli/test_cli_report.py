"""`forge runs report`: one page that is whole, for one run and for many. It is parsed strictly."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import shutil
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from forge_command import Forge
from forge_train_cli import report, screen
from forge_train_cli.curves import HEIGHT, WIDTH, Curve, drawing
from forge_train_tools.reporting.runs import reported
from forge_train_tools.run_folder import RunFolder

VOID = {"meta", "line", "circle", "polyline", "input", "br"}
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
        self.data: Any = None
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
        if self.open and self.open[-1] == "script" and self.count["script"] == 1:
            self.data = json.loads(data)
        elif self.open and self.open[-1] not in ("style", "script"):
            self.said.append(data)


def check(text: str) -> Strict:
    page = Strict(text)
    assert page.asked == []
    assert not re.search(r"url\(|@import|https?://|<iframe|<img", text)
    assert page.count["script"] == 2
    assert len(text) - len(json.dumps(page.data)) < 300_000
    return page


def curve(page: Strict, metric: str, run: int = 0) -> dict[int, float]:
    """Steps and values, as the page's script decodes them."""
    found = next(one for one in page.data["metrics"][metric] if one["run"] == run)
    values = [value for (value,) in struct.iter_unpack("<d", base64.b64decode(found["y"]))]
    return dict(zip(itertools.accumulate(found["x"]), values, strict=True))


@pytest.fixture
def first(forge: Forge, folder: Path) -> Path:
    forge("train", "tiny.toml", "--name", "first", "-q")
    return folder / "runs" / "first"


def add(file: Path, *lines: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_one_run_and_several(forge: Forge, folder: Path, first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge("runs", "report", "first")
    alone = check((folder / "report.html").read_text(encoding="utf-8"))
    assert alone.data["shown"] == ["loss", "held out loss", "grad_norm", "tokens_per_second", "lr"]
    assert curve(alone, "loss") == {line["step"]: line["loss"] for line in metrics(first)}
    assert [*curve(alone, "held out loss")] == [3, 6]
    assert "Where their configurations differ" not in " ".join(alone.said)
    forge("train", "tiny.toml", "--name", "lion", "-p", "lion", "-s", "lion.lr=0.002", "-q")
    assert forge("runs", "report", "runs/first", "lion", "-o", "both.html").out == "both.html: 2 runs\n"
    both = check((folder / "both.html").read_text(encoding="utf-8"))
    said = " ".join(both.said)
    for expected in ("2 runs", "lion.lr", "0.002", "done", "torch ", "lion (forge-train", "forge-train 0.1.0, hash "):
        assert expected in said, expected
    assert [run["name"] for run in both.data["runs"]] == ["first", "lion"]
    assert len({run["colour"] for run in both.data["runs"]}) == 2
    assert len(both.data["metrics"]["loss"]) == 2
    monkeypatch.setattr(report, "LARGE", 0)
    assert re.fullmatch(r"Reading [\d.]+ (KiB|B) of metrics\.\n", forge("runs", "report", "-o", "all.html").err)
    every = check((folder / "all.html").read_text(encoding="utf-8"))
    assert [run["name"] for run in every.data["runs"]] == ["lion", "first"]


def test_many_runs_and_what_is_hostile(forge: Forge, folder: Path, first: Path) -> None:
    """Names and values are text; a loss that is no number is a gap."""
    nasty = "</script><!--<b>\"run' & \n"
    for number in range(24):
        copy = first.with_name(f"{nasty.replace('/', '')}{number}")
        shutil.copytree(first, copy)
        config = copy / "config.toml"
        config.write_text(config.read_text(encoding="utf-8").replace('"corpus.txt"', f'"<script>{number}</script>"'))
    lines = metrics(first)
    lines[2] |= {"loss": None, "grad_norm": None, "not_finite": {"loss": "nan", "grad_norm": "inf"}}
    lines[3] |= {"mine.</script>": 1.0}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    add(copy / "events.jsonl", {"event": "anomaly", "version": 1, "time": 1.0, "step": 3, "kind": "x", "reason": nasty})
    (copy / "artifacts").mkdir(exist_ok=True)
    (copy / "artifacts" / "sample.txt").write_text(f"{nasty}</pre>", encoding="utf-8")
    (first / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n", encoding="utf-8")
    (first / "outcome.json").unlink()
    names = sorted(path.name for path in first.parent.iterdir())
    forge("runs", "report", *names, "-o", "many.html")
    page = check((folder / "many.html").read_text(encoding="utf-8"))
    said = " ".join(page.said)
    assert {"25 runs", copy.name, f"{nasty}</pre>", '"<script>7</script>"'} <= {*page.said}
    assert "unfinished" in said
    assert page.data["runs"][names.index(copy.name)]["name"] == copy.name
    at = names.index(copy.name)
    loss = curve(page, "loss", at)
    assert math.isnan(loss.pop(3))
    assert [*loss] == [1, 2, 4, 5, 6]
    assert [*curve(page, "mine.</script>", at)] == [4]
    assert [at, 3, "anomaly", f"x: {nasty}"] in page.data["events"]
    styles = {(run["colour"], *run["dash"]) for run in page.data["runs"]}
    assert len(styles) == 25


def test_what_happened_to_a_run(forge: Forge, folder: Path, first: Path) -> None:
    """Events on its curves, its mixture, its layout and links to its timelines."""
    forge("train", "--resume", "runs/first", "-s", "train.steps=9", "-q")
    shares = ({"mixture.tokens.web": 30.0, "mixture.tokens.code": 10.0}, {"mixture.tokens.web": 24.0})
    lines = [line | share for line, share in zip(metrics(first), shares, strict=False)]
    (first / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    add(
        first / "events.jsonl",
        {"event": "restarted", "version": 1, "time": 1.0, "step": 8, "reason": "rank 1 died", "attempt": 1, "world": 1},
        {"event": "run_started", "version": 1, "time": 1.0, "step": 8, "run": "first", "plugins": [], "world": 4},
    )
    (first / "a trace.html").write_text(f'<head>{screen.GENERATOR}</head><canvas id="lanes"></canvas>')
    (first / "trace.json").write_text('{"traceEvents": []}')
    (first / "notes.html").write_text("<html>mine</html>")
    forge("runs", "report", "first")
    page = Strict((folder / "report.html").read_text(encoding="utf-8"))
    kinds = [(step, kind) for _, step, kind, _ in page.data["events"]]
    assert kinds == [(3, "checkpoint"), (6, "checkpoint"), (9, "checkpoint"), (6, "restart"), (8, "restart")]
    assert any("resumed from" in text for *_, text in page.data["events"])
    assert {"web 84.4%, code 15.6%", "1 → 4", "Layouts", "Mixtures"} <= {*page.said}
    assert page.asked == ["a href=runs/first/a%20trace.html", "a href=runs/first/trace.json"]


@pytest.mark.slow
def test_a_page_of_a_hundred_long_runs_is_small(forge: Forge, folder: Path, first: Path) -> None:
    template, lines = metrics(first)[-1], []
    for step in range(1, 901):
        lines.append(json.dumps(template | {"step": step, "loss": 9.75 if step == 234 else 2 + step % 7 / 8}) + "\n")
    (first / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    runs, problems = reported([RunFolder(first)] * 100)
    text = report.page(runs, folder / "page.html")
    page = Strict(text)
    assert not problems
    assert len(text) < 12_000_000
    loss = curve(page, "loss", 99)
    assert len(loss) < 450
    assert loss[234] == 9.75
    assert (min(loss), max(loss)) == (1, 900)


def test_a_page_follows_a_run(forge: Forge, folder: Path, first: Path) -> None:
    """Each look reads what is new; a run that resumed has other lines; the page ends with the run."""
    end, beside = (first / "outcome.json").read_bytes(), folder / "live.data.js"
    (first / "outcome.json").unlink()
    line, seen = metrics(first)[-1], []

    def look() -> list[int]:
        text = beside.read_text(encoding="utf-8")
        page = Strict("")
        page.data = json.loads(text.removeprefix("forgeReport(").removesuffix(");\n"))
        assert {"runs_table", "tables"} <= page.data.keys()
        return [*curve(page, "loss")]

    def wait(seconds: float) -> None:
        if not seen:
            assert 'data-beside="live.data.js"' in (folder / "live.html").read_text(encoding="utf-8")
            seen.append([])
            add(first / "metrics.jsonl", line | {"step": 7}, line | {"step": 8})
        elif len(seen) == 1:
            seen.append(look())
            new = first / "new.jsonl"
            new.write_text("".join(json.dumps(line | {"step": step}) + "\n" for step in (1, 2, 3)), encoding="utf-8")
            new.replace(first / "metrics.jsonl")
            (first / "metrics.jsonl").open("a").write('{"step": 4, "lo')
        elif len(seen) == 2:
            seen.append(look())
            (first / "metrics.jsonl").write_text("damaged\n" * 200)
        elif len(seen) == 3:
            seen.append(look())
            (first / "outcome.json").write_bytes(end)
            (first / "metrics.jsonl").write_text(json.dumps(line) + "\n")

    runs, _ = reported([RunFolder(first)])
    ended = report.keep(runs, folder / "live.html", wait)
    assert seen == [[], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3], [1, 2, 3]]
    assert [run.outcome for run in ended] == ["done"]
    assert not beside.exists()


def test_following_ends_with_an_interrupt(
    forge: Forge, folder: Path, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first / "outcome.json").unlink()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "_again", interrupted)
    monkeypatch.setattr(report, "EVERY", 0)
    assert forge("runs", "report", "first", "--follow").out == "report.html: 1 run\n"
    assert "data-beside" not in (folder / "report.html").read_text(encoding="utf-8").partition("<script")[0]
    (folder / "report.data.js").write_text("mine()")
    assert (
        "report.data.js exists and is not data written by forge"
        in forge("runs", "report", "first", "--follow", fails=2).err
    )
    assert (folder / "report.data.js").read_text() == "mine()"


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
    text = drawing("odd", [Curve(0, "run", list(enumerate(values)))], logarithmic=logarithmic)
    for axis, number in Strict(text).numbers:
        assert math.isfinite(number)
        assert 0 <= number <= (WIDTH if axis == "x" else HEIGHT), (axis, number)


def test_long_curves_are_thinned() -> None:
    text = drawing("long", [Curve(0, "run", [(float(n), float(n % 7)) for n in range(100_000)])])
    assert len(text) < 20_000


def test_mistakes(forge: Forge, folder: Path, first: Path) -> None:
    assert "there is no such run" in forge("runs", "report", "absent", fails=2).err
    assert "No runs in nowhere" in forge("runs", "report", "--run-dir", "nowhere", fails=2).err
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

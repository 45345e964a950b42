"""`forge trace`: its page, its files and its mistakes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forge_cli import forge
from forge_train_cli import report_run, trace_page
from forge_train_tools.reporting.metrics import Metrics
from forge_train_tools.reporting.runs import ReportedRun
from forge_train_tools.tracing.analysis import Analysis
from forge_train_tools.tracing.record import Call, RankTrace, Segment, Trace

BROWSER = """
const drawn = [], handlers = {};
const pen = new Proxy({}, {get: (_, name) => (...given) => drawn.push([name, ...given]), set: () => true});
const element = (id) => ({
  id, style: {}, clientWidth: 1200, textContent: texts[id] || "", append() {}, setPointerCapture() {},
  getContext: () => pen, getBoundingClientRect: () => ({left: 0, top: 0}),
  addEventListener: (name, handler) => { handlers[id + " " + name] = handler; },
});
const texts = {data: require("fs").readFileSync(0, "utf8")}, elements = {};
globalThis.document = {
  getElementById: (id) => (elements[id] = elements[id] || element(id)), createElement: element, documentElement: {},
};
globalThis.window = {addEventListener() {}, innerWidth: 1200, matchMedia: () => ({addEventListener() {}})};
globalThis.getComputedStyle = () => ({getPropertyValue: () => "#000"});
require(process.argv[1]);
const press = (key) => handlers["lanes keydown"]({key, preventDefault() {}});
const words = () => drawn.filter(([name]) => name === "fillText").map(([, text]) => text);
const first = words();
drawn.length = 0;
press("n");
const about = elements.about.textContent;
for (const key of ["+", "ArrowRight", "0", "p", "c", "Escape"]) press(key);
handlers["lanes wheel"]({deltaX: 0, deltaY: -1, clientX: 600, clientY: 5, preventDefault() {}});
handlers["lanes pointermove"]({clientX: 600, clientY: 50});
console.log(JSON.stringify({first, about, path: drawn.filter(([name]) => name === "lineTo").length}));
"""
"""As much of a browser as the page's script touches; what it draws is printed."""


def found() -> Analysis:
    about: dict[str, Any] = {
        "kind": "all_reduce", "axis": "dp", "ranks": [0, 1], "group": "0", "number": 0, "bytes": 2048, "sent": 2048.0,
        "dtype": "float32", "shape": [512], "module": "layers.0</script>", "phase": "forward", "plugin": "ddp",
        "places": ["mine/model.py:7, in forward"],
    }  # fmt: skip
    ranks = [
        RankTrace(number, f"rank {number}", 0.0, 1.0, 1.0, 0.0, [], [Segment(0.0, 1.0, "forward", "layers.0")],
                  [Call(**about, start=start, end=0.7, waits=[(start, 0.7)])])
        for number, start in enumerate((0.6, 0.1))
    ]  # fmt: skip
    return Analysis(Trace(3, ranks))


def test_the_page_stands_alone() -> None:
    page = trace_page.page(found())
    assert len(page.encode()) < 300_000
    assert not re.search(r"https?:|src=|<link|@import|url\(", page)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    (call,) = data["ranks"][1]["calls"]
    assert (call["at"], call["bytes"], call["ready"], call["behind"]) == ([100_000, 700_000], 2048, 600_000, 0)
    assert data["texts"][call["module"]] == "layers.0</script>", "a name of a module ends no element"
    assert data["texts"][call["places"][0]] == "mine/model.py:7, in forward"
    assert page.count("</script>") == 2
    assert "<p>Rank 1 waited 50% of the step for rank 0, in layers.0 (forward).</p>" in page
    assert "<h1>Step 3 on 2 ranks" in page
    assert "prefers-color-scheme:dark" in page


def test_a_report_links_to_the_page(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "a trace.html").write_text(trace_page.page(found()), encoding="utf-8")
    run = ReportedRun(tmp_path / "runs" / "first", Metrics(tmp_path / "none", 9))
    assert [*report_run.timelines(run, tmp_path / "report.html")] == [
        '<a href="runs/first/a%20trace.html">a trace.html</a>'
    ]


@pytest.mark.skipif(not shutil.which("node"), reason="node runs the page's script")
def test_the_page_is_drawn() -> None:
    script = Path(trace_page.__file__).with_name("trace_page.js")
    drawn = subprocess.run(
        ["node", "-e", BROWSER, str(script)],
        input=json.dumps(trace_page.data(found())),
        capture_output=True,
        text=True,
        check=False,
    )
    assert drawn.returncode == 0, drawn.stderr
    shown = json.loads(drawn.stdout)
    assert {"rank 0", "rank 1", "compute", "communication", "waiting", "layers.0", "all_reduce dp"} <= {*shown["first"]}
    assert shown["about"].startswith("all_reduce dp: 2.0 KiB, float32 [512]\nranks 0, 1; seen from rank 1")
    assert shown["path"], "the critical path is a line"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--out", "trace.txt"), "--out trace.txt: expected a file that ends with .html."),
        (("--chrome", "trace.html"), "--chrome trace.html: expected a file that ends with .json."),
        (("--out", "nowhere/trace.html"), "--out nowhere/trace.html: the folder"),
        (("--out", "mine.html"), "mine.html exists and is not a page written by forge"),
        (("--chrome", "mine.json"), "mine.json exists and is not a trace written by forge"),
        (("--step", "4", "-s", "train.steps=3"), "--step 4: the run ends at step 3 (train.steps)."),
    ],
)
def test_mistakes_are_told_first(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.html", "mine.json"):
        (tmp_path / name).write_text("mine")
    ended = forge("trace", *words)
    assert ended.code == 2
    assert says in ended.err
    assert (tmp_path / "mine.html").read_text() == (tmp_path / "mine.json").read_text() == "mine"


@pytest.mark.slow
def test_a_short_run_shows_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("-s", "decoder.dim=16", "-s", "decoder.layers=1", "-s", "train.steps=2", "-s", "run.device=cpu")
    assert json.loads(forge("trace", *small, "--json").out)["step"] == 2

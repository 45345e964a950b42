"""The script of a report's page, in as much of a browser as it touches."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from forge_train_cli import report_page
from forge_train_tools.reporting.curves import Curve

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="node runs the page's script")

BROWSER = """
const given = JSON.parse(require("fs").readFileSync(0, "utf8")), elements = {}, made = [], drawn = [];
const pen = new Proxy({}, {
  get: (_, name) => name === "measureText" ? () => ({width: 30}) : (...numbers) => drawn.push([name, ...numbers]),
  set: (_, name, value) => { drawn.push([name, value]); return true; },
});
const element = (tag) => {
  const one = {
    tag, style: {}, dataset: {}, classList: {toggle() {}}, children: [], handlers: {}, textContent: "", value: "",
    clientWidth: 800, clientHeight: 260, offsetWidth: 10, offsetHeight: 10,
    append: (...more) => one.children.push(...more), replaceChildren: (...all) => { one.children = all; },
    addEventListener: (name, handler) => { one.handlers[name] = handler; }, setAttribute() {}, setPointerCapture() {},
    getContext: () => pen, getBoundingClientRect: () => ({left: 0, top: 0}), remove() {}, focus() {},
  };
  made.push(one);
  return one;
};
let hash = given.hash;
globalThis.document = {
  getElementById: (id) => (elements[id] = elements[id] || element(id)), createElement: element, body: element("body"),
  querySelectorAll: () => [], querySelector: () => null, documentElement: {}, activeElement: null,
};
const nothing = {addEventListener() {}};
globalThis.window = {...nothing, innerWidth: 1200, innerHeight: 900, matchMedia: () => nothing};
globalThis.getComputedStyle = () => ({getPropertyValue: () => "#000"});
globalThis.requestAnimationFrame = (draw) => draw();
globalThis.location = {hash: given.hash};
globalThis.history = {replaceState: (state, title, address) => { hash = address; }};
document.getElementById("data").textContent = JSON.stringify(given.data);
const canvases = () => elements.charts.children.map((one) => one.children[1]);
const text = (id) => document.getElementById(id).textContent;
const seen = () => ({
  drawn: drawn.splice(0), about: text("about"), tip: text("tip"), hash,
  charts: elements.charts.children.map((one) => one.children[0].children[0].textContent),
});
require(process.argv[1]);
const results = [seen()];
for (const [what, name, event] of given.acts) {
  if (what === "newer") window.forgeReport(event);
  else if (what === "canvas") canvases()[0].handlers[name]({preventDefault() {}, pointerId: 1, ...event});
  else { Object.assign(elements[what], event); elements[what].handlers[name]({target: elements[what]}); }
  results.push(seen());
}
console.log(JSON.stringify(results));
"""
EVENTS = [[0, 30, "checkpoint", "checkpoint step-30"], [1, 90, "anomaly", "nan: it rose"]]


def curve(values: list[float], run: int) -> dict[str, Any]:
    made = Curve(200)
    made.add(np.arange(1.0, len(values) + 1), np.array(values))
    return {"run": run, **made.plain()}


def data(**more: Any) -> dict[str, Any]:
    """Two runs: one with a spike at step 50, and one with a gap at step 20."""
    first, second = [2.0] * 100, [1.0] * 100
    first[49], second[19] = 9.0, math.nan
    runs = [{"name": name, "colour": colour, "dash": []} for name, colour in (("one", "#111"), ("two", "#222"))]
    tokens = [10.0 * step for step in range(1, 101)]
    losses = [curve(first, 0), curve(second, 1)]
    metrics = {"loss": losses, "lr": [curve(first, 0)], "tokens": [curve(tokens, 0), curve(tokens, 1)]}
    found = {"runs": runs, "shown": ["loss"], "logarithmic": [], "metrics": metrics, "events": EVENTS}
    return {**found, "tables": "", "runs_table": "", **more}


def act(*acts: tuple[str, str, Any], hash: str = "", shown: dict[str, Any] | None = None) -> list[Any]:
    """What the page shows at first, and after each act."""
    script = Path(report_page.__file__).with_name("report_page.js")
    given = json.dumps({"data": shown or data(), "acts": acts, "hash": hash})
    ended = subprocess.run(
        ["node", "-e", BROWSER, str(script)], input=given, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)  # type: ignore[no-any-return]


def view(result: dict[str, Any]) -> dict[str, Any]:
    return json.loads(unquote(result["hash"].removeprefix("#")))  # type: ignore[no-any-return]


def key(name: str) -> tuple[str, str, Any]:
    return "canvas", "keydown", {"key": name}


def lines(result: dict[str, Any]) -> list[tuple[float, float]]:
    return [(x, y) for name, *where in result["drawn"] if name in ("lineTo", "moveTo") for x, y in [where]]


def test_a_spike_is_drawn_and_a_gap_is_marked() -> None:
    (first,) = act()
    top = min(y for _, y in lines(first))
    assert any(abs(x - (62 + 49 / 99 * 728)) < 0.5 and y < 22 for x, y in lines(first)), top
    assert first["charts"] == ["loss"]
    gap = 62 + 19 / 99 * 728
    crosses = [one for one in first["drawn"] if one[0] == "moveTo" and abs(abs(one[1] - gap) - 4) < 0.5 and one[2] == 8]
    assert len(crosses) == 2


def test_keys_zoom_move_and_choose() -> None:
    plain, zoomed, moved, whole, picked, event, other, let_go = act(
        *map(key, ["+", "ArrowRight", "0", "n", "e", "e", "Escape"])
    )
    assert (view(plain)["z"], view(whole)["z"]) == (None, None)
    low, high = view(zoomed)["z"]
    assert high - low == pytest.approx(0.6 * 99)
    assert view(moved)["z"] == pytest.approx([low + (high - low) / 8, high + (high - low) / 8])
    assert picked["about"] == "Picked: one"
    assert event["about"] == "one, step 30: checkpoint step-30"
    assert other["about"] == "one, step 30: checkpoint step-30", "the events of the run that is picked"
    assert let_go["about"] == ""


def test_the_pointer_zooms_and_names_a_value() -> None:
    at = 62 + 49 / 99 * 728
    shown, *_, zoomed, everything = act(
        ("canvas", "pointermove", {"clientX": at, "clientY": 20}),
        ("canvas", "pointerdown", {"clientX": 100, "clientY": 50, "button": 0}),
        ("canvas", "pointermove", {"clientX": 300, "clientY": 50}),
        ("canvas", "pointerup", {"clientX": 300, "clientY": 50}),
        ("canvas", "dblclick", {}),
    )[1:]
    assert shown["tip"] == "one\nstep 50: 9"
    assert view(zoomed)["z"] == pytest.approx([1 + 38 / 728 * 99, 1 + 238 / 728 * 99])
    assert view(everything)["z"] is None


def test_axes_smoothing_and_runs_are_kept_in_the_address() -> None:
    *_, last = act(
        ("log", "change", {"checked": True}), ("smooth", "input", {"value": "50"}),
        ("across", "change", {"value": "tokens"}),
        ("clip", "change", {"checked": True}), ("find", "input", {"value": "ON"}),
    )  # fmt: skip
    assert {"s": 50, "x": "tokens", "l": 1, "c": 1, "f": "on", "m": {"loss": 0}}.items() <= view(last).items()
    assert max(y for _, y in lines(last)) < 260
    assert "#222" not in {one[1] for one in last["drawn"] if one[0] == "strokeStyle"}, "the other run is not shown"
    (again,) = act(hash=last["hash"])
    assert view(again) == view(last)
    assert lines(again) == lines(last)
    assert {"10", "100", "tokens"} <= {one[1] for one in again["drawn"] if one[0] == "fillText"}
    assert view(act(hash="#nonsense")[0])["m"] == {"loss": 0}


def test_a_smoothed_curve_lags_in_no_direction() -> None:
    rise = [curve([0.0] * 50 + [1.0] * 50, 0)]
    *_, last = act(("smooth", "input", {"value": "60"}), shown=data(metrics={"loss": rise}, events=[]))
    drawn = lines(last)[-100:]
    middle = sum(drawn[at][1] for at in (49, 50)) / 2
    assert middle == pytest.approx((drawn[0][1] + drawn[-1][1]) / 2, abs=2.5)
    assert drawn[40][1] - middle == pytest.approx(middle - drawn[59][1], abs=5)
    assert drawn[49][1] - drawn[50][1] < 20, "the step is a slope"


def test_newer_data_leaves_the_view() -> None:
    newer = data()
    newer["metrics"]["loss"] = [curve([3.0] * 300, 0), curve([4.0] * 300, 1)]
    newer["metrics"]["held out loss"] = [curve([3.0], 0)]
    _, zoomed, after, whole = act(key("+"), ("newer", "", {**newer, "shown": ["loss", "held out loss"]}), key("0"))
    assert view(after)["z"] == view(zoomed)["z"]
    assert after["charts"] == ["loss", "held out loss"]
    assert max(x for x, _ in lines(whole)) == pytest.approx(790)
    assert {"Infinity", "NaN"}.isdisjoint(str(one) for one in lines(whole))


def test_many_curves_are_thin_and_solid_but_the_one_that_is_picked() -> None:
    looks = [{"name": f"run {at}", "colour": "#111", "dash": [7, 3]} for at in range(29)]
    losses = [curve([float(at), at + 1.0], at) for at in range(29)]
    some, many = ({**data(), "runs": looks[:n], "metrics": {"loss": losses[:n]}, "events": []} for n in (28, 29))

    def dashes(result: dict[str, Any]) -> list[list[int]]:
        return [one[1] for one in result["drawn"] if one[0] == "setLineDash"][::2]

    assert dashes(act(shown=some)[0]) == [[7, 3]] * 28
    plain, picked = act(key("n"), shown=many)
    assert dashes(plain) == [[]] * 29
    assert dashes(picked) == [[]] * 28 + [[7, 3]]


@pytest.mark.parametrize("runs", [0, 1])
def test_a_run_without_metrics(runs: int) -> None:
    given = data(metrics={}, shown=[], events=[], runs=data()["runs"][:runs])
    (first,) = act(shown=given)
    assert first["charts"] == []

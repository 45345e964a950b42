"""The page of `forge runs report`: its frame, and the data that its script draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from forge_train import __version__
from forge_train.base.format import format_bytes
from forge_train_tools.reporting.runs import HELD_OUT, ReportedRun

from . import screen
from .report_sections import outcomes, sections
from .report_tables import labels, style

SHOWN = ("loss", f"{HELD_OUT}loss", "grad_norm", "tokens_per_second", "lr")
"""Metrics that are drawn at first."""
LOGARITHMIC = ("grad_norm",)
"""Metrics whose axis is logarithmic at first."""
EVENTS = 500
"""Most events of each kind that are marked on a curve of a run: the newest."""
KINDS = {"checkpoint_saved": "checkpoint", "anomaly": "anomaly", "restarted": "restart", "resumed": "restart",
         "interrupted": "restart"}  # fmt: skip
"""Events that are marked, and as what."""
FRAME = """
<div id="bar" role="toolbar" aria-label="Curves">
<label>smooth <input id="smooth" type="range" min="0" max="100" value="0"></label>
<label>across <select id="across">
<option value="step">step</option><option value="tokens">tokens</option></select></label>
<label><input id="log" type="checkbox"> log</label>
<label><input id="clip" type="checkbox"> fit without spikes</label>
<label><input id="events" type="checkbox" checked> events</label>
<span><button id="in" aria-label="zoom in">+</button> <button id="out" aria-label="zoom out">−</button>
<button id="all">everything</button></span>
<label>runs <input id="find" type="search" size="12" placeholder="part of a name"></label>
</div>
<details id="choose"><summary>Metrics</summary><div id="choice"></div></details>
<p id="help">Drag over a curve to zoom in, with Shift to move, double-click for everything. On a focused curve: + and −,
wheel, ← and →, 0 for everything, n and p for the next and the previous run, e for the next event, Escape.
Marks: □ checkpoint, △ anomaly, ○ restart or resume, × a value that is not finite.</p>
<div id="charts"><noscript>The curves are drawn by JavaScript; the tables below need none.</noscript></div>
<p id="about" aria-live="polite"></p><div id="tip"></div>
"""


def page(runs: Sequence[ReportedRun], out: Path, beside: Path | None = None) -> str:
    """The HTML of a report.

    Args:
        runs: shown, in this order.
        out: the file that will hold it: links start there.
        beside: a script with newer data, while runs are followed.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    scripts = "script-src 'unsafe-inline'" + (" 'self' file:" if beside else "")
    follows = f' data-beside="{escape(beside.name)}"' if beside else ""
    look, script = (files(__package__).joinpath(f"report_page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    found = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"{screen.GENERATOR}"
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f'{scripts}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{look}</style></head><body{follows}><h1>{escape(title)}</h1>"
        f'<div id="runs">{outcomes(runs)}</div>{FRAME}<div id="tables">{sections(runs, out)}</div>'
        f"<p>Written by forge {escape(__version__)}.</p>"
        f'<script type="application/json" id="data">{screen.embedded(data(runs))}</script>'
        f"<script>{script}</script></body></html>\n"
    )
    return found.encode("utf-8", "replace").decode()  # the name of a file may be no text


def refreshed(runs: Sequence[ReportedRun], out: Path) -> str:
    """A script that gives newer data to an open page."""
    newer = {**data(runs), "runs_table": outcomes(runs), "tables": sections(runs, out)}
    return f"forgeReport({screen.embedded(newer)});\n"


def data(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """The curves and events of a page, and the look of its runs."""
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    names.sort(key=lambda name: (SHOWN.index(name) if name in SHOWN else len(SHOWN), name.startswith(HELD_OUT)))
    return {
        "runs": [{"name": name, "colour": style(at)[0], "dash": style(at)[1]} for at, name in enumerate(labels(runs))],
        "shown": [name for name in SHOWN if name in names],
        "logarithmic": LOGARITHMIC,
        "metrics": {
            name: [{"run": at, **run.curves[name].plain()} for at, run in enumerate(runs) if name in run.curves]
            for name in names
        },
        "events": [one for at, run in enumerate(runs) for one in _events(at, run)],
    }


def _events(at: int, run: ReportedRun) -> Iterator[tuple[int, int, str, str]]:
    """Run, step, kind and text of the newest events."""
    for kind in dict.fromkeys(KINDS.values()):
        found = [event for event in run.events if _kind(event) == kind]
        for event in found[-EVENTS:]:
            yield at, int(event.get("step", 0)), kind, _text(event)


def _kind(event: dict[str, Any]) -> str | None:
    if event["event"] == "run_finished":
        return "anomaly" if event.get("outcome") in ("diverged", "failed") else None
    return KINDS.get(event["event"])


def _text(event: dict[str, Any]) -> str:
    reason = event.get("reason") or ""
    match event["event"]:
        case "checkpoint_saved":
            size = event.get("bytes")
            return f"checkpoint {event.get('path', '')}" + (f", {format_bytes(size)}" if isinstance(size, int) else "")
        case "anomaly":
            return f"{event.get('kind', 'anomaly')}: {reason}"
        case "resumed":
            changes = "; ".join(map(str, event.get("changes") or ()))
            return f"resumed from {event.get('checkpoint', '')}" + (f", changed: {changes}" if changes else "")
        case "run_finished":
            return f"{event['outcome']}: {reason}"
        case name:
            return f"{name}: {reason}"

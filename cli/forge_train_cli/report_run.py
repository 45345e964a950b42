"""The part of a report about one run: where it ran, its composition, events, configuration and profiles."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from forge_train_kit.format import format_phase
from forge_train_tools.reporting.runs import ReportedRun

from . import screen
from .report_tables import folded, mark, shown, table, written

EVENTS = 200
"""Most events that are listed of each run."""
TIMELINES = ("*.html", "*.json", "artifacts/*.html", "artifacts/*.json", "artifacts/profile/*.json.gz")


def about(at: int, run: ReportedRun, name: str, out: Path, *, opened: bool) -> str:
    known, git = run.environment, run.environment.get("git") or {}
    machine = [*known.get("devices", ()), f"{known.get('cpus', '?')} CPUs", str(known.get("platform", "?"))]
    facts = {
        "folder": str(run.path),
        "command": " ".join(known.get("argv", ())),
        "forge": f"{known.get('forge', '?')}, Python {known.get('python', '?')}, torch {known.get('torch', '?')}",
        "git": f"{git['commit']}{' with changes' if git['dirty'] else ''}" if git else "–",
        "machine": ", ".join(machine),
        "plugins": ", ".join(f"{one['name']} ({one['distribution']} {one['version']})" for one in run.plugins),
    }
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    if links := "<br>".join(timelines(run, out)):
        listed += f"<dt>timelines</dt><dd>{links}</dd>"
    phases = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _phase(entry))}</tr>" for entry in run.composition]
    composed = table(("phase", "plugin", "modules", ""), phases) if phases else "<p>No plugin changed the model.</p>"
    values = "\n".join(f"{key} = {written(value)}" for key, value in run.config.items())
    inside = (
        f"<dl>{listed}</dl>{composed}",
        folded(f"e{at}", "Events", _events(run), opened=False) if run.events else "",
        folded(f"c{at}", "Configuration", f"<pre>{escape(values)}</pre>", opened=False),
        _profiles(at, run),
    )
    return folded(f"r{at}", mark(at) + escape(name), "".join(inside), opened=opened)


def _events(run: ReportedRun) -> str:
    """The newest events, the last one first."""
    rows = []
    for event in reversed(run.events[-EVENTS:]):
        others = {key: value for key, value in event.items() if key not in ("event", "version", "time", "step")}
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if (moment := _moment(event)) else "–"
        text = ", ".join(f"{key} {shown(value)}" for key, value in others.items() if value not in (None, "", [], {}))
        cells = (when, shown(event.get("step")), event["event"].replace("_", " "), text)
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    left = len(run.events) - len(rows)
    note = f"<p>{left:,} older ones are left out.</p>" if left else ""
    return table(("time", "step", "event", ""), rows) + note


def _moment(event: Mapping[str, Any]) -> float | None:
    moment = event.get("time")
    return moment if isinstance(moment, (int, float)) and 0 < moment < 2**35 else None


def timelines(run: ReportedRun, out: Path) -> Iterable[str]:
    """Links to what `forge trace` and `profile` left in the run's folder."""
    for file in sorted(path for pattern in TIMELINES for path in run.path.glob(pattern) if path.is_file()):
        with file.open("rb") as content:
            begins = content.read(8192)
        page = screen.GENERATOR.encode() in begins and b'id="lanes"' in file.read_bytes()
        if page or begins.startswith((b'{"traceEvents"', b"\x1f\x8b")):
            place = quote(Path(os.path.relpath(file.resolve(), out.absolute().parent.resolve())).as_posix())
            yield f'<a href="{escape(place)}">{escape(str(file.relative_to(run.path)))}</a>' + (
                "" if page else " (for Perfetto)"
            )


def _profiles(at: int, run: ReportedRun) -> str:
    """Tables from profiled ranks."""
    files = sorted((run.path / "artifacts" / "profile").glob("*.txt"))
    tables = "".join(f"<pre>{escape(file.read_text(encoding='utf-8', errors='replace'))}</pre>" for file in files)
    return folded(f"p{at}", "Profile", tables, opened=False) if files else ""


def _phase(entry: dict[str, Any]) -> tuple[str, str, str, str]:
    return format_phase(entry["phase"], entry["slot"]), entry["plugin"], f"{len(entry['matched']):,}", entry["note"]

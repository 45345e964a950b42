"""`forge runs report`: runs as one self-contained HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import click

from forge_train import __version__
from forge_train_kit.format import format_duration, format_number, format_phase
from forge_train_tools.run_folder import RunFolder, differences, open_run

from . import screen
from .curves import Curve, chart, colour
from .options import run_dir_option

CHARTS = (
    ("loss", "Training loss", False),
    ("grad_norm", "Gradient norm, logarithmic", True),
    ("tokens_per_second", "Tokens per second", False),
    ("lr", "Learning rate", False),
)
"""Metric, title, and whether its axis is logarithmic."""
SAMPLES = 40
"""Most answers that are shown of each run."""
STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c1f23;--dim:#667;--rule:#d8dce2;--light:42%}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--text:#e3e6ea;--dim:#98a1ab;--rule:#343a41;--light:66%}}
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;
max-width:1360px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}p,figcaption,dt{color:var(--dim)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:1rem}
figure{margin:0}svg{width:100%;height:auto}svg text{fill:var(--dim);font-size:11px}
.grid{stroke:var(--rule)}.curve{fill:none;stroke-width:1.6}.wide{overflow-x:auto}
table{border-collapse:collapse}th,td{text-align:left;padding:.2rem .8rem .2rem 0;
border-bottom:1px solid var(--rule);vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}th{color:var(--dim);font-weight:normal}
td,th,dd{overflow-wrap:anywhere}.key{white-space:nowrap}i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.5em}
details{border-bottom:1px solid var(--rule);padding:.3rem 0}summary{cursor:pointer}pre{overflow-x:auto}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}dd{margin:0}
"""


@click.command(short_help="Write a report of runs as one HTML page.")
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", "--output", "-o", "output", default="report.html", show_default=True, metavar="FILE",
              callback=screen.page, help="File to write; only a page made by forge is overwritten.")  # fmt: skip
@run_dir_option
def report(names: tuple[str, ...], output: str, run_dir: str) -> None:
    """Write one page that shows runs side by side: curves, differences in their configurations, what they were made of,
    where they ran and how they ended. The page loads nothing from elsewhere.

    \b
    forge runs report runs/* -o report.html
    """
    from .runs import whole

    histories = whole([open_run(name, Path(run_dir)) for name in dict.fromkeys(names)], least=1)
    screen.write(Path(output), page(histories))
    click.echo(f"{output}: {len(histories)} run{'s' if len(histories) > 1 else ''}")


def page(histories: Sequence[RunFolder]) -> str:
    """The HTML of a report."""
    title = histories[0].name if len(histories) == 1 else f"{len(histories)} runs"
    hover = "".join(f"body:has(.t{run}:hover) .curve:not(.r{run}){{opacity:.12}}" for run in range(len(histories)))
    sections = [
        f"<h1>{escape(title)}</h1>",
        _outcomes(histories),
        f'<h2>Curves</h2><div class="charts">{"".join(_charts(histories))}</div>',
        _differences(histories) if len(histories) > 1 else "",
        "<h2>Each run</h2>",
        *(_run(run, history, opened=len(histories) == 1) for run, history in enumerate(histories)),
        f"<p>Written by forge {escape(__version__)}.</p>",
    ]
    head = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"{screen.GENERATOR}"
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{hover}</style></head><body>"
    )
    return f"{head}{''.join(sections)}</body></html>\n"


def _outcomes(histories: Sequence[RunFolder]) -> str:
    heads = ("run", "outcome", "step", "loss", "held-out loss", "tokens/s", "time")
    rows = []
    for run, history in enumerate(histories):
        why = f" ({history.reason})" if history.reason else ""
        numbers = (
            f"{history.step:,}",
            _number(history.last.get("loss")),
            _number(history.evaluation.get("loss")),
            _number(history.last.get("tokens_per_second")),
            format_duration(_seconds(history)),
        )
        cells = [f"<td>{_mark(run, history)}</td><td>{escape(history.outcome + why)}</td>"]
        cells += [f'<td class="n">{escape(number)}</td>' for number in numbers]
        rows.append(f'<tr class="t{run}">{"".join(cells)}</tr>')
    return _table(heads, rows)


def _charts(histories: Sequence[RunFolder]) -> Iterable[str]:
    for key, title, logarithmic in CHARTS:
        curves = [_curve(run, history, history.metrics, key) for run, history in enumerate(histories)]
        yield chart(title, curves, logarithmic=logarithmic)
        if key == "loss":
            held_out = [_curve(run, history, history.evaluations, "loss") for run, history in enumerate(histories)]
            yield chart("Held-out loss", held_out)


def _curve(run: int, history: RunFolder, lines: Iterable[dict[str, Any]], key: str) -> Curve:
    points = [(float(line["step"]), float(line[key])) for line in lines if line.get(key) is not None]
    return Curve(run, history.name, points)


def _differences(histories: Sequence[RunFolder]) -> str:
    found = differences([history.config for history in histories])
    if not found:
        return "<h2>Where their configurations differ</h2><p>Nowhere.</p>"
    heads = ("", *(history.name for history in histories))
    rows = [
        f'<tr><td class="key">{escape(key)}</td>{"".join(f"<td>{escape(_value(one))}</td>" for one in values)}</tr>'
        for key, values in found.items()
    ]
    return f"<h2>Where their configurations differ</h2>{_table(heads, rows)}"


def _run(run: int, history: RunFolder, *, opened: bool) -> str:
    known, git = history.environment, history.environment.get("git") or {}
    machine = [*known.get("devices", ()), f"{known.get('cpus', '?')} CPUs", str(known.get("platform", "?"))]
    facts = {
        "folder": str(history.path),
        "command": " ".join(known.get("argv", ())),
        "forge": f"{known.get('forge', '?')}, Python {known.get('python', '?')}, torch {known.get('torch', '?')}",
        "git": f"{git['commit']}{' with changes' if git['dirty'] else ''}" if git else "–",
        "machine": ", ".join(machine),
        "plugins": ", ".join(f"{one['name']} ({one['distribution']} {one['version']})" for one in history.plugins),
    }
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    phases = [
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _phase(entry))}</tr>" for entry in history.composition
    ]
    composed = _table(("phase", "plugin", "modules", ""), phases) if phases else "<p>No plugin changed the model.</p>"
    values = "\n".join(f"{key} = {_value(value)}" for key, value in history.config.items())
    return (
        f"<details{' open' if opened else ''}><summary>{_mark(run, history)}</summary><dl>{listed}</dl>{composed}"
        f"<details><summary>Configuration</summary><pre>{escape(values)}</pre></details>{_samples(history)}{_profiles(history)}</details>"
    )


def _samples(history: RunFolder) -> str:
    """The newest answers of the model that the run kept."""
    file = history.path / "artifacts" / "samples.jsonl"
    if not file.is_file():
        return ""
    lines = [one for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if (one := _parsed(line))]
    heads = list(dict.fromkeys(key for line in lines[-SAMPLES:] for key in line))
    rows = ("".join(f"<td>{escape(_shown(line.get(key)))}</td>" for key in heads) for line in lines[-SAMPLES:])
    table = _table(heads, (f"<tr>{row}</tr>" for row in rows))
    return f"<details><summary>Samples</summary>{table}</details>" if lines else ""


def _parsed(line: str) -> dict[str, Any] | None:
    """A line of JSON; None for one that was cut off."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else _value(value)


def _profiles(history: RunFolder) -> str:
    """Tables from profiled ranks."""
    files = sorted((history.path / "artifacts" / "profile").glob("*.txt"))
    tables = "".join(f"<pre>{escape(file.read_text(encoding='utf-8', errors='replace'))}</pre>" for file in files)
    return f"<details><summary>Profile</summary>{tables}</details>" if files else ""


def _phase(entry: dict[str, Any]) -> tuple[str, str, str, str]:
    return format_phase(entry["phase"], entry["slot"]), entry["plugin"], f"{len(entry['matched']):,}", entry["note"]


def _mark(run: int, history: RunFolder) -> str:
    return f'<i style="background:{colour(run)}"></i>{escape(history.name)}'


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _seconds(history: RunFolder) -> float:
    """Time spent in steps, without evaluations and checkpoints."""
    steps = [0, *(line["step"] for line in history.metrics)]
    spent = [
        line["step_seconds"] * (line["step"] - before)
        for before, line in zip(steps, history.metrics, strict=False)
        if line.get("step_seconds") is not None
    ]
    return sum(spent) if spent else math.nan


def _number(value: Any) -> str:
    return "–" if value is None else format_number(float(value))


def _value(value: Any) -> str:
    return "–" if value is None else json.dumps(value, ensure_ascii=False)

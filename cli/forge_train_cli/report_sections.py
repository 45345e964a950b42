"""The tables of a report: plain HTML, in which every text is escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from forge_train_kit.format import format_duration, format_number
from forge_train_tools.reporting.runs import HELD_OUT, ReportedRun
from forge_train_tools.run_folder import differences

from .report_run import about
from .report_tables import COLOURS, folded, grid, labels, mark, number, shown, table, written

SAMPLES = 40
"""Most answers that are shown of each run."""
SHARES = re.compile(r"mixture\.tokens\.(.+)")
"""Metrics that count the tokens of a source of data."""


def sections(runs: Sequence[ReportedRun], out: Path) -> str:
    """All tables but that of the runs.

    Args:
        runs: shown, in this order.
        out: the page: links start there.
    """
    names = labels(runs)
    several = len(runs) > 1
    tables = [
        _evaluations(runs, names),
        *(_unlike(runs, names) if several else ()),
        _layouts(runs, names),
        _mixtures(runs, names),
        _samples(runs, names),
        "<h2>Each run</h2>",
        *(about(at, run, names[at], out, opened=not several) for at, run in enumerate(runs)),
    ]
    return "".join(tables)


def outcomes(runs: Sequence[ReportedRun]) -> str:
    """The table of the runs, each with its line, to show and hide them."""
    names = labels(runs)
    heads = ("run", "outcome", "step", "loss", "held-out loss", "tokens/s", "time")
    rows = []
    for at, run in enumerate(runs):
        why = f" ({run.reason})" if run.reason else ""
        numbers = (
            f"{run.step:,}",
            number(run.last.get("loss")),
            number(run.evaluation.get("loss")),
            number(run.last.get("tokens_per_second")),
            format_duration(run.seconds),
        )
        shown = f'<label><input type="checkbox" checked data-run="{at}"> {mark(at)}{escape(names[at])}</label>'
        cells = [f'<td class="run">{shown}</td><td>{escape(run.outcome + why)}</td>']
        cells += [f'<td class="n">{escape(number)}</td>' for number in numbers]
        rows.append(f'<tr data-row="{at}">{"".join(cells)}</tr>')
    every = '<p><button id="none">hide all</button> <button id="every">show all</button></p>' if len(runs) > 1 else ""
    return f"{table(heads, rows)}{every}"


def _evaluations(runs: Sequence[ReportedRun], names: Sequence[str]) -> str:
    """The last evaluation of each run, and its tasks."""
    found: dict[str, dict[int, str]] = {}
    for at, run in enumerate(runs):
        for key, value in run.evaluation.items():
            shown = f"{value:,}" if key == "step" else number(value)
            found.setdefault("at step" if key == "step" else HELD_OUT + key, {})[at] = shown
        for task, result in run.tasks.items():
            for name, metric in result.metrics.items():
                error = "" if metric.error is None else f" ± {format_number(metric.error)}"
                found.setdefault(f"{task} {name}", {})[at] = format_number(metric.value) + error
    rows = {key: [values.get(at, "–") for at in range(len(runs))] for key, values in found.items()}
    return f"<h2>Evaluations</h2>{grid(names, rows)}" if rows else ""


def _unlike(runs: Sequence[ReportedRun], names: Sequence[str]) -> Iterable[str]:
    """Differences of configurations, plugins and machines."""
    plugins = [
        {one["name"]: f"{one['distribution']} {one['version']}, hash {one['hash'][:12]}" for one in run.plugins}
        for run in runs
    ]
    for title, form, tables in (
        ("Where their configurations differ", written, [run.config for run in runs]),
        ("Where their plugins differ", shown, plugins),
        ("Where their machines and versions differ", shown, [_facts(run) for run in runs]),
    ):
        rows = {key: [form(one) for one in values] for key, values in differences(tables).items()}
        yield f"<h2>{title}</h2>{grid(names, rows) if rows else '<p>Nowhere.</p>'}"


def _facts(run: ReportedRun) -> dict[str, Any]:
    """Machine and versions of a run, without its command, which always differs."""
    known = {key: value for key, value in run.environment.items() if key != "argv"}
    git = known.pop("git", None)
    return known | ({"git": git["commit"][:12] + (" with changes" if git["dirty"] else "")} if git else {})


def _layouts(runs: Sequence[ReportedRun], names: Sequence[str]) -> str:
    """Processes and axes of runs, and the plugins that changed their models."""
    rows: dict[str, list[str]] = {"processes": [], "axes": [], "composed": []}
    for run in runs:
        worlds = [event["world"] for event in run.events if isinstance(event.get("world"), int)]
        axes = {
            key.removeprefix("parallel."): value for key, value in run.config.items() if key.startswith("parallel.")
        }
        sizes = [f"{axis} {size}" for axis, size in axes.items() if isinstance(size, int) and size > 1]
        rows["processes"].append(" → ".join(dict.fromkeys(map(str, worlds))) or "–")
        rows["axes"].append(", ".join(sizes) or "–")
        composed = dict.fromkeys(entry["plugin"] for entry in run.composition)
        rows["composed"].append(", ".join(composed) or "–")
    return f"<h2>Layouts</h2>{grid(names, rows)}"


def _mixtures(runs: Sequence[ReportedRun], names: Sequence[str]) -> str:
    """Shares of the sources of data, by the tokens that were learned."""
    rows = []
    for at, run in enumerate(runs):
        sums = {found[1]: curve.total for key, curve in run.curves.items() if (found := SHARES.fullmatch(key))}
        whole = sum(sums.values())
        if not whole:
            continue
        shares = [(name, count / whole) for name, count in sums.items()]
        bar = "".join(
            f'<span style="width:{share:.2%};background:{COLOURS[5 - place % 6]}">{escape(name)}</span>'
            for place, (name, share) in enumerate(shares)
        )
        text = ", ".join(f"{name} {share:.1%}" for name, share in shares)
        cells = f'<td class="run">{mark(at)}{escape(names[at])}</td><td><div class="shares">{bar}</div></td>'
        rows.append(f"<tr>{cells}<td>{escape(text)}</td></tr>")
    return f"<h2>Mixtures</h2>{table(('run', 'tokens learned', ''), rows)}" if rows else ""


def _samples(runs: Sequence[ReportedRun], names: Sequence[str]) -> str:
    """The text that each run wrote at its end, and the newest answers that it kept."""
    parts = []
    for at, run in enumerate(runs):
        text, lines = run.path / "artifacts" / "sample.txt", _answers(run)
        if text.is_file():
            sample = f"<pre>{escape(text.read_text(encoding='utf-8', errors='replace'))}</pre>"
            parts.append(folded(f"s{at}", mark(at) + escape(names[at]), sample, opened=len(runs) < 5))
        if lines:
            heads = list(dict.fromkeys(key for line in lines for key in line))
            cells = ("".join(f'<td class="pre">{escape(shown(line.get(key)))}</td>' for key in heads) for line in lines)
            rows = (f"<tr>{row}</tr>" for row in cells)
            parts.append(folded(f"a{at}", f"{mark(at)}{escape(names[at])}: answers", table(heads, rows), opened=False))
    return f"<h2>Samples</h2>{''.join(parts)}" if parts else ""


def _answers(run: ReportedRun) -> list[dict[str, Any]]:
    file = run.path / "artifacts" / "samples.jsonl"
    if not file.is_file():
        return []
    found = map(_parsed, file.read_text(encoding="utf-8", errors="replace").splitlines())
    return [one for one in found if one][-SAMPLES:]


def _parsed(line: str) -> dict[str, Any] | None:
    """A line of JSON; None for one that was cut off."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None

"""The table of a run, as Markdown and JSON."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from .case import BAD, Case, Row
from .suite import Result

MANY = 4
"""Rows of a case, above which it has one row in the table."""


def markdown(cases: list[Case], results: list[Result], about: dict[str, Any], *, toy: bool) -> str:
    """The page; what needs a device, or a package, stands there as such."""
    found = {result.name: result for result in results}
    counts = Counter(result.status for result in results)
    where = f"{about['device']}, torch {about['torch']}, Python {about['python']}, {about['cores']} cores"
    lines = [
        "# On the GPU",
        "",
        f"Written by `make gpu` on {time.strftime('%Y-%m-%d')}: {where}.",
        *(["At toy size: speeds and sizes say nothing."] if toy else []),
        "",
        ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) + ".",
        "",
        "| case | what | measured | bar | met |",
        "|---|---|---|---|---|",
    ]
    for case in sorted(cases, key=lambda one: one.judges != "speed"):  # what most readers come for
        if (result := found.get(case.name)) is None:
            continue
        for row in _folded(result.rows):
            met = "yes" if row.ok else "**no**"
            lines.append(f"| {case.name} | {_cell(row.name)} | {_cell(row.measured)} | {_cell(row.bar)} | {met} |")
        if not result.rows:
            met = "**no**" if result.status in BAD else "—"
            lines.append(f"| {case.name} | {_cell(result.told.splitlines()[0])} | {result.status} | — | {met} |")
    for result in results:
        if result.status in ("failed", "deadline"):
            lines += ["", f"## {result.name}: {result.status}", "", "```text", result.told, "```"]
    return "\n".join([*lines, ""])


def _folded(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Many rows with limits as one, which is the nearest to its limit; the JSON has them all."""
    if len(rows) <= MANY or not all(row.ok and row.bar.startswith("≤ ") for row in rows):
        return rows
    worst = max(rows, key=lambda row: float(row.measured) / float(row.bar[2:]))
    return (replace(worst, name=f"{len(rows)} numbers; nearest to its bar: {worst.name}"),)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def plain(results: list[Result], about: dict[str, Any]) -> str:
    """The same as JSON."""
    return json.dumps({"machine": about, "cases": [asdict(result) for result in results]}, indent=1) + "\n"

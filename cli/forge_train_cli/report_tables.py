"""Parts of the tables of a report: plain HTML, in which every text is escaped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from forge_train_kit.format import format_number
from forge_train_tools.reporting.runs import ReportedRun

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
"""Those of Okabe and Ito (2008), which colour-blind people tell apart, without those that a background hides."""
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))
"""Tell runs of the same colour apart."""
ACROSS = 6
"""Most runs that are columns of a table; more of them are rows."""


def style(at: int) -> tuple[str, tuple[int, ...]]:
    """Colour and dashes of a run: they repeat after 28 runs."""
    return COLOURS[at % len(COLOURS)], DASHES[at // len(COLOURS) % len(DASHES)]


def labels(runs: Sequence[ReportedRun]) -> list[str]:
    """Names of runs; paths of those that share a name."""
    count = Counter(run.name for run in runs)
    return [run.name if count[run.name] == 1 else str(run.path) for run in runs]


def mark(at: int) -> str:
    """The line of a run, as its curves are drawn."""
    colour, dash = style(at)
    dashes = f' stroke-dasharray="{",".join(map(str, dash))}"' if dash else ""
    line = f'<line x1="0" x2="30" y1="5" y2="5" stroke="{colour}" stroke-width="3"{dashes}/>'
    return f'<svg class="mark" viewBox="0 0 30 10" aria-hidden="true">{line}</svg>'


def folded(key: str, title: str, content: str, opened: bool) -> str:
    return f'<details id="{key}"{" open" if opened else ""}><summary>{title}</summary>{content}</details>'


def grid(names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table of keys by runs; of many runs, by keys."""
    heads, lines = list(names), list(rows.items())
    if len(names) > ACROSS:
        heads, lines = list(rows), [(name, [row[at] for row in rows.values()]) for at, name in enumerate(names)]
    body = (
        f'<tr><td class="key">{escape(key)}</td>{"".join(f"<td>{escape(one)}</td>" for one in values)}</tr>'
        for key, values in lines
    )
    return table(("", *heads), body)


def table(heads: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def number(value: Any) -> str:
    return "–" if value is None else format_number(float(value))


def shown(value: Any) -> str:
    return value if isinstance(value, str) else written(value)


def written(value: Any) -> str:
    return "–" if value is None else json.dumps(value, ensure_ascii=False)

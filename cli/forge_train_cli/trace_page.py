"""The findings of `forge trace`, as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from forge_train import __version__
from forge_train.base.strict_json import dumps

from . import screen
from .trace import CALM, COLUMNS, collectives, remarks, shares

if TYPE_CHECKING:
    from forge_train_tools.tracing.analysis import Analysis
    from forge_train_tools.tracing.record import Call

STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c1f23;--dim:#667;--rule:#d8dce2;--pick:#000}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--text:#e3e6ea;--dim:#98a1ab;--rule:#343a41;--pick:#fff}}
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;max-width:1400px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}p,th,#help{color:var(--dim)}
canvas{width:100%;display:block;border:1px solid var(--rule);touch-action:none;cursor:crosshair}
canvas:focus-visible,button:focus-visible{outline:3px solid #56b4e9}
#tip{position:fixed;pointer-events:none;background:var(--back);border:1px solid var(--rule);padding:.3rem .6rem;
white-space:pre-line;font-size:13px;max-width:40rem;display:none;box-shadow:0 2px 8px #0003}
#about{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--rule);padding:.6rem;min-height:7rem;
font:13px/1.5 ui-monospace,monospace}
.legend span{margin-right:1.2rem;white-space:nowrap}.legend i{display:inline-block;width:1em;height:1em;
margin-right:.4em;vertical-align:-.15em;border:1px solid var(--dim)}
.wide{overflow-x:auto}table{border-collapse:collapse}th{font-weight:normal;text-align:left}
th,td{padding:.1rem 1.2rem .1rem 0;white-space:nowrap;border-bottom:1px solid var(--rule)}
td{font-variant-numeric:tabular-nums}
"""
HELP = (
    "Wheel or + and − zoom, dragging or ← and → move, 0 shows the whole step, n and p go from one call to the next, "
    "c goes along the critical path, Escape lets go."
)
BUTTONS = (
    '<p><button id="in">+</button> <button id="out">−</button> <button id="all">whole step</button> '
    '<button id="path">critical path</button></p>'
)
CANVAS = (
    '<canvas id="lanes" tabindex="0" role="img" aria-label="Timeline of all ranks" aria-describedby="help"></canvas>'
)


def page(found: Analysis) -> str:
    """The page. Its data is JSON in a script element, and the script beside this module draws it."""
    trace = found.trace
    title = f"Step {trace.step} on {len(trace.ranks)} rank{'s' * (len(trace.ranks) != 1)}, {trace.seconds * 1e3:.1f} ms"
    waits = [one.sentence for one in found.told] or [CALM]
    tables = [
        f"<h3>{escape(rank.name)}</h3>{_table(COLUMNS, collectives(found, rank.rank))}"
        for rank in trace.ranks
        if rank.calls
    ]
    sections = [
        f"<h1>{escape(title)}</h1>",
        "".join(f"<p>{escape(text)}</p>" for text in (*waits, *(f"{note}." for note in remarks(found)))),
        f'<p id="help">{HELP}</p>',
        BUTTONS,
        CANVAS,
        '<p class="legend" id="legend"></p>',
        '<div id="about" aria-live="polite">Click on something, or press n.</div><div id="tip"></div>',
        f"<h2>Shares</h2>{_table(('', 'compute', 'communication', 'waiting'), shares(found))}",
        *(["<h2>Collectives</h2>", *tables] if tables else []),
        f"<p>Written by forge {escape(__version__)}.</p>",
        f'<script type="application/json" id="data">{screen.embedded(data(found))}</script>',
        f"<script>{files(__package__).joinpath('trace_page.js').read_text(encoding='utf-8')}</script>",
    ]
    head = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"{screen.GENERATOR}"
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(filter(None, sections)) + "</body></html>\n"


def data(found: Analysis) -> dict[str, Any]:
    """Data of the page: times in microseconds, and texts by their place in a list."""
    texts: dict[str, int] = {}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    def call(one: Call) -> dict[str, Any]:
        ready, behind = found.last.get(one.key, (one.start, -1))
        return {
            "name": text(f"{one.kind} {one.axis}"), "at": [_us(one.start), _us(one.end)], "bytes": one.bytes,
            "about": text(f"{one.dtype} {one.shape}"), "ranks": text(_peers(one)), "module": text(one.module),
            "phase": text(one.phase), "plugin": text(one.plugin), "places": [text(place) for place in one.places],
            "key": text(dumps(one.key)), "ready": _us(ready), "behind": behind,
            "waits": [[_us(a), _us(b)] for a, b in one.waits],
        }  # fmt: skip

    ranks = [
        {
            "name": rank.name,
            "at": [_us(rank.start), _us(rank.end)],
            "segments": [[_us(one.start), _us(one.end), text(one.phase), text(one.module)] for one in rank.segments],
            "calls": [call(one) for one in rank.calls],
        }
        for rank in found.trace.ranks
    ]
    path = [[one.rank, _us(one.start), _us(one.end), text(one.kind)] for one in found.path]
    return {"end": _us(found.trace.seconds), "ranks": ranks, "path": path, "texts": [*texts]}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _peers(call: Call) -> str:
    if call.kind in ("send", "recv"):
        return f"from rank {call.ranks[0]} to rank {call.ranks[1]}"
    return f"ranks {', '.join(map(str, call.ranks))}"


def _table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(str(name))}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'

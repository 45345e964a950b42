"""The findings of `forge debug look`, as one self-contained HTML page."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from forge_train import __version__

from . import screen

if TYPE_CHECKING:
    from forge_train_tools.looking.found import Lens, Looked

CELL = 14
"""Pixels of a value in a picture."""
SMALLEST = 2
"""The same, where a text is long."""
WIDEST = 900
"""Pixels of a picture, unless the text is longer than this many tokens of the smallest size."""
LABELLED = 96
"""Tokens up to which each is written beside a picture."""
PALE, STRONG = (246, 248, 250), (24, 83, 148)
"""Colours of the least and the greatest value."""
STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c1f23;--dim:#667;--rule:#d8dce2}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--text:#e3e6ea;--dim:#98a1ab;--rule:#343a41}}
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;max-width:1200px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}p,figcaption,th{color:var(--dim)}
.maps{display:flex;flex-wrap:wrap;gap:1.5rem}figure{margin:0}.wide{overflow-x:auto}
svg text{fill:var(--dim);font:11px ui-monospace,monospace}svg image{image-rendering:pixelated}
table{border-collapse:collapse}th{font-weight:normal}
th,td{padding:.1rem .5rem;text-align:left;white-space:nowrap;border-bottom:1px solid var(--rule)}
td,th:first-child{font-family:ui-monospace,monospace;font-size:13px}
td.l{color:#1c1f23}td.d{color:#fff}td.t{font-weight:bold}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--rule);padding:.6rem}
"""


def page(found: Looked) -> str:
    """The page."""
    title = f"{found.checkpoint}, step {found.step}"
    words = [word(text) for text in found.texts]
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<pre>{escape(word(found.text))}</pre>",
        "<h2>Norms of the residual stream</h2>",
        "<p>2-norm of each token's state, before the first layer and after each, with the mean of each line.</p>",
        _norms(found, words),
        "<h2>Attention</h2>",
        "<p>Each line is a query, each column a key that it sees. The darker, the greater the weight, from 0 to 1.</p>"
        * bool(found.attention),
        *(f"<p>{escape(name)}: {escape(reason)}.</p>" for name, reason in found.without.items()),
        f'<div class="maps">{"".join(_maps(found, words))}</div>',
        "<h2>Logit lens</h2>",
        f"<p>{escape(found.no_lens)}</p>" if found.lens is None else _lens(found, found.lens, words),
        f"<p>Written by forge {escape(__version__)}.</p>",
    ]
    head = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"{screen.GENERATOR}"
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(filter(None, sections)) + "</body></html>\n"


def word(text: str) -> str:
    """A token's text with visible white space; a dot for a part of a character."""
    return screen.visible(text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")) or "·"


def _norms(found: Looked, words: Sequence[str]) -> str:
    norms = found.norms
    shares = norms / norms.amax(1, keepdim=True).clamp(min=1e-30)
    means = [f"{name}  {mean:.3g}" for name, mean in zip(found.states, norms.mean(1).tolist(), strict=True)]
    return f'<div class="wide">{picture(shares.tolist(), means, words)}</div>'


def _maps(found: Looked, words: Sequence[str]) -> Iterator[str]:
    for name, weights in found.attention.items():
        layer, head = name.split(".")
        drawn = picture(weights.tolist(), words if len(words) <= LABELLED else [], words)
        yield f"<figure>{drawn}<figcaption>layer {layer}, head {head}</figcaption></figure>"


def _lens(found: Looked, lens: Lens, words: Sequence[str]) -> str:
    """A line for each token, a column for each state."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in found.states)
    rows = []
    for at, own in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        cells = [_guess(lens, state, at) for state in range(len(found.states))]
        rows.append(f"<tr><th>{escape(own)}</th>{''.join(cells)}<td>{escape(following)}</td></tr>")
    return (
        "<p>The final norm and the head, applied to each state: the likeliest next token, its probability, and the "
        "rank of the token that does follow. Right guesses are bold.</p>"
        f'<div class="wide"><table><tr><th>token</th>{heads}<th>follows</th></tr>{"".join(rows)}</table></div>'
    )


def _guess(lens: Lens, state: int, at: int) -> str:
    probability = float(lens.probability[state, at])
    rank = int(lens.rank[state, at]) if at < lens.rank.shape[1] else None
    marks = ["d" if probability > 1 / 2 else "l"] + ["t"] * (rank == 1)
    text = f"{word(lens.texts[state][at])} {probability:.0%}" + (f" #{rank:,}" if rank else "")
    colour = "rgb({},{},{})".format(*_colour(probability))
    return f'<td class="{" ".join(marks)}" style="background:{colour}">{escape(text)}</td>'


# -- pictures -------------------------------------------------------------------------------------


def picture(values: Sequence[Sequence[float]], lines: Sequence[str], columns: Sequence[str]) -> str:
    """A picture of values from 0 to 1, with words beside its lines and above its columns."""
    count = len(values[0])
    cell = max(SMALLEST, min(CELL, WIDEST // count))
    left = 8 + 7 * max(map(len, lines), default=0)
    named = columns if count <= LABELLED and cell >= CELL * 2 // 3 else []
    top = 8 + 7 * max(map(len, named), default=0)
    wide, high = count * cell, len(values) * max(cell, CELL if len(values) < len(columns) else cell)
    line = high / len(values)
    parts = [
        f'<text x="{left - 5}" y="{top + (at + 0.75) * line:.1f}" text-anchor="end">{escape(text)}</text>'
        for at, text in enumerate(lines)
    ]
    parts += [
        f'<text transform="translate({left + (at + 0.75) * cell:.1f},{top - 5}) rotate(-90)">{escape(text)}</text>'
        for at, text in enumerate(named)
    ]
    data = base64.b64encode(png(values)).decode()
    parts.append(
        f'<image x="{left}" y="{top}" width="{wide}" height="{high:.0f}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{data}"/>'
    )
    return f'<svg width="{left + wide}" height="{top + high:.0f}" role="img">{"".join(parts)}</svg>'


def png(values: Sequence[Sequence[float]]) -> bytes:
    """A PNG with a pixel for each value from 0 to 1 (https://www.w3.org/TR/png-3/)."""
    lines = b"".join(b"\0" + b"".join(bytes(_colour(value)) for value in line) for line in values)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", len(values[0]), len(values), 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def _colour(value: float) -> tuple[int, int, int]:
    """Between `PALE` and `STRONG`; what is no number is red."""
    if math.isnan(value):
        return 200, 40, 40
    share = min(max(value, 0.0), 1.0)
    red, green, blue = (round(low + (high - low) * share) for low, high in zip(PALE, STRONG, strict=True))
    return red, green, blue

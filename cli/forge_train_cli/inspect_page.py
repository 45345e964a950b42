"""The findings of `forge data inspect`, as one self-contained HTML page."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Iterable
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from forge_train import __version__

from . import screen
from .inspect import about, bars, quantiles, repeated
from .samples import written

if TYPE_CHECKING:
    from forge_train_kit.data.inspection import Findings, Sample, ShownItem

STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c1f23;--dim:#667;--rule:#d8dce2}
:root{--a:#dbe7f5;--b:#f7e6cf;--bar:#5b8fc7}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--text:#e3e6ea;--dim:#98a1ab;--rule:#343a41}
:root{--a:#243b55;--b:#4d3c22}}
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;max-width:1000px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
p,th{color:var(--dim)}th{font-weight:normal;white-space:nowrap}
th,td{text-align:left;padding:.1rem .8rem .1rem 0;vertical-align:top;overflow-wrap:anywhere}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.bars,.bars td:nth-child(2){width:100%}.bar{background:var(--bar);height:1em;border-radius:2px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7;border:1px solid var(--rule);padding:.6rem}
i{font-style:normal;background:var(--a);border-radius:2px}i:nth-of-type(even){background:var(--b)}
i:hover{outline:2px solid var(--bar)}hr{border:0;border-top:2px dashed var(--dim)}
.u{opacity:.45}.s{font-weight:bold;outline:1px solid var(--dim)}
figure{display:inline-block;vertical-align:top;width:12rem;margin:.3rem .8rem .3rem 0;overflow-wrap:anywhere}
figure>:first-child{max-width:100%;max-height:10rem}figcaption{color:var(--dim);font-size:.8rem}
"""
LARGEST = 1 << 20
"""Bytes of an item that the page shows."""


def page(findings: Findings) -> str:
    """The page."""
    title = next(text for _, text in about(findings))
    most = max(count for _, _, count in findings.lengths.bins)
    lines = (
        f'<tr><th class="n">{escape(name)}</th><td><div class="bar" style="width:{100 * count / most:.2f}%"></div></td>'
        f'<td class="n">{escape(shown)}</td></tr>'
        for (name, _, shown), (_, _, count) in zip(bars(findings), findings.lengths.bins, strict=True)
    )
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<table>{''.join(_row(name, text) for name, text in about(findings))}</table>",
        f'<h2>Tokens of a document</h2><table class="bars">{"".join(lines)}</table>',
        _paragraphs([quantiles(findings)]),
        f"<h2>Duplicates</h2>{_paragraphs(repeated(findings))}",
        "<h2>Samples</h2><p>One shade per token; hover over a token to see its id. A dashed line ends a document, "
        "special tokens have a frame, and tokens that are not learned are pale.</p>" * bool(findings.samples),
        *map(_sample, findings.samples),
        f"<p>Written by forge {escape(__version__)}.</p>",
    ]
    head = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"{screen.GENERATOR}"
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(sections) + "</body></html>\n"


def _row(name: str, text: str) -> str:
    return f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"


def _paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _sample(sample: Sample) -> str:
    parts = []
    for token in sample.tokens:
        style = " ".join(["u"] * (not token.learned) + ["s"] * token.special)
        known = f' class="{style}"' if style else ""
        parts.append(f'<i{known} title="{token.id}">{escape(written(token))}</i>' + "<hr>" * token.ends)
    shown = "".join(_figure(path, [*items]) for path, items in groupby(sample.items, key=_file))
    return f"<h3>document {sample.document:,}</h3><pre>{''.join(parts)}</pre>{shown}"


def _file(item: ShownItem) -> tuple[str, int, int | None]:
    return item.path, item.offset, item.size


def _figure(file: tuple[str, int, int | None], parts: list[ShownItem]) -> str:
    """An item as the browser shows its file, or why it is not shown."""
    path, offset, size = file
    kind = mimetypes.guess_type(path)[0] or f"{parts[0].modality}/unknown"  # browsers look into the content
    tag = (
        None
        if parts[0].decoded
        else {"image": "img", "video": "video controls muted", "audio": "audio controls"}.get(kind.split("/")[0])
    )
    content, why = (
        b"",
        "not shown: " + ("it is kept decoded" if parts[0].decoded else "no browser shows it" if tag is None else ""),
    )
    try:
        with Path(path).open("rb") as stream:
            stream.seek(offset)
            content = stream.read(LARGEST + 1 if size is None else min(size, LARGEST + 1)) if tag else b""
    except OSError as error:
        why += error.strerror or str(error)
    if len(content) > LARGEST:
        content, why = b"", f"{why}it has more than {LARGEST:,} bytes"
    data = f'src="data:{escape(kind)};base64,{base64.b64encode(content).decode()}"'
    seen = f"<{tag} {data}>{'</' + tag.split()[0] + '>' if tag and tag != 'img' else ''}" if content else escape(why)
    lines = (f"{one.modality} {'×'.join(map(str, one.grid))} at {one.position}" for one in parts)
    return f"<figure>{seen}<figcaption>{escape(', '.join(lines))}<br>{escape(path)}</figcaption></figure>"

"""Pictures of the guides in docs/learn: ranks as lanes, time from left to right. `docs/guides.py` writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

LEFT, TOP, LANE, GAP = 64, 12, 46, 10
STYLE = """
svg{background:#fff}text{fill:#223;font:12px system-ui,sans-serif;text-anchor:middle}.name{text-anchor:end}
.lane{fill:#eef0f3}.frame{fill:none;stroke:#889}.have{fill:#8fb8e8}.work{fill:#a5d6b7}.talk{fill:#f3c77f}
.idle{fill:#d8dce2}.bad{fill:#eb9a8b}.arrow{stroke:#b4690e;stroke-width:2;fill:none}.head{fill:#b4690e}
@media(prefers-color-scheme:dark){svg{background:#14171a}text{fill:#e3e6ea}.lane{fill:#22272c}.have{fill:#2b5b94}
.work{fill:#27684a}.talk{fill:#7d5410}.idle{fill:#343a41}.bad{fill:#8a3527}}
"""


@dataclass(frozen=True)
class Column:
    """A stretch of time.

    Args:
        width: in pixels.
        lanes: text and class of each rank's box; an empty text leaves the lane free.
        across: text of a collective of all ranks, instead of boxes.
        filled: for each rank, parts of its box that are held, as fractions from and up to.
        message: sender and receiver of an arrow.
    """

    width: int
    lanes: Sequence[tuple[str, str]] = ()
    across: str = ""
    filled: Sequence[Sequence[tuple[float, float]]] = ()
    message: tuple[int, int] | None = None


def holds(text: str, *filled: Sequence[tuple[float, float]], width: int = 96) -> Column:
    """Shares of something that ranks hold."""
    return Column(width, [(text, "frame")] * len(filled), filled=filled)


def works(*texts: str, width: int = 110) -> Column:
    """Work of each rank."""
    return Column(width, [(text, "work") for text in texts])


def across(text: str, width: int = 104) -> Column:
    """A collective of all ranks."""
    return Column(width, across=text)


def drawing(title: str, ranks: int, columns: Sequence[Column]) -> str:
    """The picture as SVG."""
    height = TOP * 2 + ranks * LANE + (ranks - 1) * GAP
    parts, x = [], LEFT
    for column in columns:
        parts.append(_column(column, x, ranks, height))
        x += column.width + GAP
    lanes = "".join(
        f'<text class="name" x="{LEFT - 8}" y="{_middle(rank)}">rank {rank}</text>'
        f'<rect class="lane" x="{LEFT}" y="{_top(rank)}" width="{x - GAP - LEFT}" height="{LANE}"/>'
        for rank in range(ranks)
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {x} {height}" role="img" aria-label="{escape(title)}">'
    )
    return f"{head}<style>{STYLE}</style><title>{escape(title)}</title>{lanes}{''.join(parts)}</svg>\n"


def _top(rank: int) -> int:
    return TOP + rank * (LANE + GAP)


def _middle(rank: int) -> int:
    return _top(rank) + LANE // 2 + 4


def _column(column: Column, x: int, ranks: int, height: int) -> str:
    width = column.width
    if column.across:
        box = f'<rect class="talk" x="{x}" y="{TOP - 4}" width="{width}" height="{height - 2 * TOP + 8}" rx="4"/>'
        return box + _text(column.across, x + width / 2, height / 2)
    if column.message:
        sender, receiver = column.message
        begin, end = (_middle(one) - 4 for one in (sender, receiver))
        return (
            f'<path class="arrow" d="M{x} {begin} L{x + width - 6} {end}"/>'
            f'<circle class="head" cx="{x + width - 6}" cy="{end}" r="5"/>'
        )
    parts = []
    for rank, (text, kind) in enumerate(column.lanes):
        if not text:
            continue
        for begin, end in column.filled[rank] if column.filled else ():
            parts.append(
                f'<rect class="have" x="{x + begin * width:g}" y="{_top(rank) + 4}" '
                f'width="{(end - begin) * width:g}" height="{LANE - 8}"/>'
            )
        parts.append(f'<rect class="{kind}" x="{x}" y="{_top(rank) + 4}" width="{width}" height="{LANE - 8}"/>')
        parts.append(_text(text, x + width / 2, _middle(rank) - 4))
    return "".join(parts)


def _text(text: str, x: float, y: float) -> str:
    lines = text.split("\n")
    start = y + 4 - (len(lines) - 1) * 7.5
    return "".join(f'<text x="{x:g}" y="{start + 15 * at:g}">{escape(line)}</text>' for at, line in enumerate(lines))


# -- pictures ---------------------------------------------------------------------------------------------------------

LOW, HIGH, ALL = [(0.0, 0.5)], [(0.5, 1.0)], [(0.0, 1.0)]


def ddp() -> str:
    """A step of data parallelism."""
    return drawing(
        "A step of data parallelism",
        2,
        [
            holds("weights", ALL, ALL, width=84),
            works("forward and backward\nof rows 0 and 1", "forward and backward\nof rows 2 and 3", width=150),
            holds("gradients\nof its rows", ALL, ALL),
            across("reduce-scatter", width=110),
            holds("mean\ngradients", LOW, HIGH),
            across("all-gather", width=84),
            holds("mean\ngradients", ALL, ALL),
            works("the same\noptimizer step", "the same\noptimizer step"),
        ],
    )


def fsdp2() -> str:
    """One group of weights through a step of FSDP2."""
    return drawing(
        "One group of weights in a step of FSDP2",
        2,
        [
            holds("weights", LOW, HIGH),
            across("all-gather"),
            holds("weights", ALL, ALL),
            works("forward", "forward", width=70),
            holds("weights", LOW, HIGH),
            across("all-gather"),
            works("backward", "backward", width=70),
            holds("gradients\nof its rows", ALL, ALL),
            across("reduce-\nscatter", width=80),
            holds("mean\ngradients", LOW, HIGH),
            works("optimizer\nof its half", "optimizer\nof its half", width=86),
        ],
    )


def tp() -> str:
    """One block under tensor and sequence parallelism."""
    return drawing(
        "A feed-forward block under tensor and sequence parallelism",
        2,
        [
            holds("hidden states", LOW, HIGH),
            works("norm", "norm", width=60),
            across("all-gather"),
            holds("hidden states", ALL, ALL),
            works("up, gate:\nfirst columns", "up, gate:\nlast columns"),
            works("down:\nfirst rows", "down:\nlast rows", width=90),
            holds("a part of\nevery sum", ALL, ALL),
            across("reduce-\nscatter", width=84),
            holds("hidden states", LOW, HIGH),
        ],
    )


def pp() -> str:
    """1F1B on two ranks, with four micro-batches."""
    first = "F0 F1 - B0 F2 B1 F3 B2 - B3"
    last = "- F0 B0 F1 B1 F2 B2 F3 B3 -"
    kinds = {"F": "have", "B": "work", "-": "idle"}
    columns = [
        Column(72, [("bubble" if one == "-" else _pass(one), kinds[one[0]]) for one in both])
        for both in zip(first.split(), last.split(), strict=True)
    ]
    return drawing("Four micro-batches on two ranks by 1F1B", 2, columns)


def _pass(name: str) -> str:
    return f"{'forward' if name[0] == 'F' else 'backward'}\n{name[1]}"


def ep() -> str:
    """A layer of experts."""
    return drawing(
        "A layer of experts on two ranks",
        2,
        [
            works("router\non its tokens", "router\non its tokens"),
            across("all-to-all\n(dispatch)"),
            works("experts 0 and 1\non all their tokens", "experts 2 and 3\non all their tokens", width=140),
            across("all-to-all\n(combine)"),
            works("sum of both\nexperts' outputs", "sum of both\nexperts' outputs", width=130),
        ],
    )


def cp() -> str:
    """Attention under context parallelism."""
    outer, inner = [(0.0, 0.25), (0.75, 1.0)], [(0.25, 0.75)]
    return drawing(
        "Attention under context parallelism",
        2,
        [
            holds("tokens", outer, inner),
            works("queries, keys,\nvalues of its tokens", "queries, keys,\nvalues of its tokens", width=140),
            across("all-gather"),
            holds("keys and values", ALL, ALL, width=110),
            works("attention\nof its queries", "attention\nof its queries"),
            across("reduce-scatter\nin the\nbackward pass", width=112),
            holds("gradients of\nkeys and values", outer, inner, width=110),
        ],
    )


def together() -> str:
    """A layer on four ranks, by FSDP2 and tensor parallelism."""
    parts = [[(at / 4, (at + 1) / 4)] for at in (0, 2, 1, 3)]  # tp takes a half, and dp_shard a half of that
    halves = [LOW, HIGH, LOW, HIGH]
    return drawing(
        "A layer's weights and tokens on four ranks, dp_shard 2 × tp 2",
        4,
        [
            holds("weights", *parts),
            across("all-gather\nof weights\nover dp_shard:\n0 with 2,\n1 with 3", width=112),
            holds("weights", *halves),
            holds("tokens", *halves),
            across("all-gather\nof tokens\nover tp:\n0 with 1,\n2 with 3"),
            works(*[f"half of the block,\nrows {rows}" for rows in ("0, 1", "0, 1", "2, 3", "2, 3")], width=130),
            across("reduce-scatter\nof outputs\nover tp:\n0 with 1,\n2 with 3", width=112),
            holds("tokens", *halves),
        ],
    )


def muon() -> str:
    """Two matrices in a step of Muon."""
    return drawing(
        "Two matrices in a step of Muon on two ranks",
        2,
        [
            holds("matrix A", LOW, HIGH),
            holds("matrix B", LOW, HIGH),
            across("all-to-all"),
            Column(96, [("matrix A", "frame"), ("matrix B", "frame")], filled=[ALL, ALL]),
            works("orthogonalize A", "orthogonalize B", width=120),
            across("all-to-all"),
            holds("update of A", LOW, HIGH),
            holds("update of B", LOW, HIGH),
        ],
    )


def checkpoints() -> str:
    """A checkpoint that two ranks save, and other layouts read."""
    return drawing(
        "A weight that two ranks save by rows, and two others load by columns",
        2,
        [
            holds("rows of o", LOW, HIGH),
            works("save", "save", width=60),
            Column(190, [("rank-00000: o[0:16, 0:32]", "frame"), ("rank-00001: o[16:32, 0:32]", "frame")]),
            works("read what\noverlaps", "read what\noverlaps", width=90),
            holds("columns of o", LOW, HIGH, width=110),
        ],
    )


def balance() -> str:
    """Biases of a router in a step."""
    return drawing(
        "Biases of a router in a step on two ranks",
        2,
        [
            works("router on\nits tokens", "router on\nits tokens", width=90),
            holds("tokens of\neach expert", [(0.0, 0.3)], [(0.0, 0.6)], width=100),
            across("all-reduce"),
            holds("tokens of\neach expert", [(0.0, 0.9)], [(0.0, 0.9)], width=100),
            works("move biases", "move biases"),
            holds("the same\nbiases", ALL, ALL, width=90),
        ],
    )


def precision() -> str:
    """One group of weights in a step in bf16."""
    return drawing(
        "One group of weights in a step in bf16",
        2,
        [
            holds("fp32", LOW, HIGH, width=84),
            works("to bf16", "to bf16", width=66),
            across("all-gather\nof bf16"),
            holds("bf16", ALL, ALL, width=84),
            works("forward and\nbackward in bf16", "forward and\nbackward in bf16", width=130),
            works("gradients\nto fp32", "gradients\nto fp32", width=80),
            across("reduce-scatter\nof fp32", width=110),
            works("optimizer\nin fp32", "optimizer\nin fp32", width=80),
        ],
    )


PICTURES: dict[str, Callable[[], str]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "tp": tp,
    "pp": pp,
    "ep": ep,
    "cp": cp,
    "together": together,
    "checkpoints": checkpoints,
    "balance": balance,
    "muon": muon,
    "precision": precision,
}

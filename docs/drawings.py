"""Pictures of the guides in docs/learn; `docs/guides.py` writes them."""

from __future__ import annotations

from collections.abc import Callable

from lanes import Column, across, drawing, holds, works

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


def memory() -> str:
    """Shares of a rank under FSDP2 at three moments of a step."""
    return drawing(
        "Shares of two ranks at three moments of a step under FSDP2",
        2,
        [
            holds("weights", LOW, HIGH, width=84),
            works("forward:\none layer whole", "forward:\none layer whole", width=100),
            holds("activations\nof its rows", ALL, ALL, width=90),
            works("backward", "backward", width=70),
            holds("gradients", LOW, HIGH, width=84),
            works("update", "update", width=60),
            holds("states", LOW, HIGH, width=84),
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
    "memory": memory,
    "checkpoints": checkpoints,
    "balance": balance,
    "muon": muon,
    "precision": precision,
}

"""Puts the pieces of an activation together, on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .layout import Kind, Piece

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""Samples and positions."""


@dataclass
class Recorded:
    """Activations of one step or evaluation, in the order of the data."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Name → `[samples, tokens, …]`, or what the reduction leaves of it. A name is the module's; a module that gives
    several tensors has `name[0]`, `name[key]`, one that is called again `name#2`. `input_ids` and `position_ids` say
    which token each row of values is of."""
    kinds: dict[str, Kind] = field(default_factory=dict)
    """Name → its first axes."""
    samples: list[int] = field(default_factory=list)
    """The number of each sample in the stream of the data, in the order of the first axis."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Name → why its pieces could not be put together."""


def joined(found: Recorded, name: str, pieces: Sequence[Piece], *, norm: bool = False) -> None:
    """Put one activation together.

    Args:
        found: is given it.
        name: of the activation.
        pieces: of all ranks.
        norm: whether the pieces are sums of squares.
    """
    kind = pieces[0].kind
    groups: dict[Key, dict[int, Piece]] = {}
    alike = True
    for piece in pieces:
        places = () if piece.positions is None else tuple(piece.positions.tolist())
        known = groups.setdefault((tuple(piece.samples.tolist()), places), {}).setdefault(piece.part[0], piece)
        alike &= known is piece or torch.equal(known.values, piece.values)
    rows = sorted({row for samples, _ in groups for row in samples})
    wholes = {key: _features(list(parts.values())) for key, parts in groups.items()}
    if not alike or any(whole is None for whole in wholes.values()) or len({piece.kind for piece in pieces}) > 1:
        found.left_out[name] = "ranks hold different values of it, which have no axis of tokens, heads or features"
        return
    index = {row: at for at, row in enumerate(rows)}
    length = max(piece.length for piece in pieces)
    first = next(iter(wholes.values()))
    assert first is not None
    lead = (len(rows), length) if kind == "tokens" else (len(rows),)
    full = first.new_zeros((*lead, *first.shape[len(lead) :]))
    for (samples, places), whole in sorted(wholes.items(), key=lambda one: one[0]):
        assert whole is not None
        at = torch.tensor([index[row] for row in samples])
        if kind == "tokens":
            full[at[:, None], torch.tensor(places)] = whole
        elif pieces[0].added:
            full[at] += whole
        else:
            full[at] = whole
    found.tensors[name] = full.sqrt() if norm and pieces[0].added else full
    found.kinds[name] = kind
    if kind == "tokens" and len(rows) > len(found.samples):
        found.samples = rows


def _features(parts: list[Piece]) -> Tensor | None:
    """All features of some rows and tokens, of the ranks that hold pieces of them; None if that is unknown."""
    parts = sorted(parts, key=lambda piece: piece.part)
    first = parts[0]
    if len(parts) == 1:
        return first.values
    if not first.certain or first.split is None:
        if all(torch.equal(one.values, first.values) for one in parts):
            return first.values
        if first.split is None:
            return None
        if first.kind != "tokens" and not first.added:
            return None
    values = [one.values for one in parts]
    if first.added and first.kind == "tokens":  # sums of squares
        return torch.stack(values).sum(0)
    return torch.cat(values, first.split)

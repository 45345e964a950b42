"""Sends parts of matrices to the ranks that own them, and back, in one buffer of bytes per direction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .matrices import Box, Matrix
from .owners import Exchange, Regions, Round

ALIGNED = 8
"""A part's place in a buffer is a multiple of this many bytes, so that any dtype is aligned."""
Dtypes = Callable[[str], torch.dtype]
"""Name of a part → its dtype."""


@dataclass(frozen=True)
class Piece:
    """The part of a matrix, or of a rule's state for it, that one rank holds."""

    matrix: Matrix
    name: str
    """Name of the state; empty for the matrix."""
    box: Box
    """The part's place in the parameter, or in its state."""
    whole: Box
    """The place of the whole matrix or state."""


@dataclass(frozen=True)
class Message:
    """The pieces that a rank sends to each rank of a group, or receives from each."""

    pieces: tuple[tuple[Piece, ...], ...]
    """The pieces, by rank in the group."""

    def sizes(self, dtypes: Dtypes) -> list[int]:
        """Number of bytes for each rank."""
        return [sum(_room(piece, dtypes) for piece in pieces) for pieces in self.pieces]

    def buffer(self, device: Any, dtypes: Dtypes) -> Tensor:
        return torch.empty(sum(self.sizes(dtypes)), dtype=torch.uint8, device=device)

    def parts(self, buffer: Tensor, dtypes: Dtypes) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece and its place in a buffer."""
        start = 0
        for piece in itertools.chain(*self.pieces):
            dtype = dtypes(piece.name)
            end = start + piece.box.numel * dtype.itemsize
            yield piece, buffer[start:end].view(dtype).view(piece.box.shape)
            start += _room(piece, dtypes)

    def gather(self, buffer: Tensor, device: Any, dtypes: Dtypes) -> dict[tuple[int, ...], dict[str, Tensor]]:
        """Shape → the full matrices of that shape, `[matrices, rows, columns]`, and their state by name."""
        full = {
            shape: {
                name: torch.empty(len(self._places[shape]), *whole, dtype=dtypes(name), device=device)
                for name, whole in wholes.items()
            }
            for shape, wholes in self._wholes.items()
        }
        for target, part in self._targets(full, buffer, dtypes):
            target.copy_(part)
        return full

    def scatter(self, full: Mapping[tuple[int, ...], Mapping[str, Tensor]], buffer: Tensor, dtypes: Dtypes) -> None:
        """The reverse of `gather`."""
        for source, part in self._targets(full, buffer, dtypes):
            part.copy_(source)

    def _targets(self, full: Mapping[Any, Mapping[str, Tensor]], buffer: Tensor, dtypes: Dtypes) -> Iterator[Any]:
        for piece, part in self.parts(buffer, dtypes):
            shape = piece.matrix.box.shape
            at = self._places[shape][piece.matrix]
            yield piece.box.of(full[shape][piece.name][at : at + 1], piece.whole), part

    @cached_property
    def _places(self) -> dict[tuple[int, ...], dict[Matrix, int]]:
        """Shape → matrices of that shape and their places."""
        found: dict[tuple[int, ...], dict[Matrix, int]] = {}
        for piece in itertools.chain(*self.pieces):
            same = found.setdefault(piece.matrix.box.shape, {})
            same.setdefault(piece.matrix, len(same))
        return found

    @cached_property
    def _wholes(self) -> dict[tuple[int, ...], dict[str, tuple[int, int]]]:
        """Shape → rows and columns of each name, for matrices of that shape."""
        found: dict[tuple[int, ...], dict[str, tuple[int, int]]] = {}
        for piece in itertools.chain(*self.pieces):
            found.setdefault(piece.matrix.box.shape, {})[piece.name] = piece.whole.shape[1:]
        return found


@dataclass(frozen=True)
class Traffic:
    """A group's rounds, as seen by one of its ranks."""

    rounds: tuple[tuple[Message, Message], ...]
    """The pieces that the rank sends to owners and receives as an owner; on the way back, they are swapped."""
    group: Any

    @classmethod
    def of(
        cls,
        exchange: Exchange,
        regions: Mapping[int, Regions],
        rank: int,
        pieces: Callable[[Matrix, Box], Sequence[Piece]],
        group: Any,
    ) -> Traffic:
        def held(by: int, matrices: Sequence[Matrix]) -> tuple[Piece, ...]:
            return tuple(piece for matrix in matrices for piece in pieces(matrix, regions[matrix.parameter][by]))

        def messages(one: Round) -> tuple[Message, Message]:
            mine = one.owned[exchange.ranks.index(rank)]
            sent = Message(tuple(held(rank, matrices) for matrices in one.owned))
            return sent, Message(tuple(held(other, mine) for other in exchange.ranks))

        return cls(tuple(messages(one) for one in exchange.rounds), group)

    def send(self, buffer: Tensor, sent: Message, received: Message, dtypes: Dtypes) -> Tensor:
        """The bytes that the other ranks sent."""
        result = received.buffer(buffer.device, dtypes)
        torch.distributed.all_to_all_single(
            result, buffer, received.sizes(dtypes), sent.sizes(dtypes), group=self.group
        )
        return result


def group_of(ranks: Sequence[int], where: tuple[Any, Sequence[int]]) -> Any:
    """The process group of ranks that differ along these axes of a mesh."""
    import torch.distributed as dist

    mesh, axes = where
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _room(piece: Piece, dtypes: Dtypes) -> int:
    return math.ceil(piece.box.numel * dtypes(piece.name).itemsize / ALIGNED) * ALIGNED

"""Attention over sequences that are split over ranks, by a kernel for whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from forge_train import ConfigError
from forge_train_kit.layers import AttentionKernel, AttentionOptions
from forge_train_kit.model import PerBatch, is_imagined, rows_are_whole

from .cut import Cut, Span, cut_of, gathered_starts, head_tail
from .moving import GatherSequence, Group, HeadsForSequence, Move, SequenceForHeads, all_gather, moves
from .ring import Blocks, Ring

Inner = Literal["gather", "ring"]


@dataclass(frozen=True)
class Sequences:
    """The whole sequences of a batch, as the ranks of a layout have them.

    Args:
        cut: of all ranks.
        starts: where the document of each token begins, `[batch, length]`; None where rows are one text each.
        lowest: the same, the lowest of all rows at each position.
        ranks: of the layout.
        prefix_ends: of each token, `[batch, length]`; None without prefixes.
    """

    cut: Cut
    starts: Tensor | None
    lowest: Sequence[int]
    ranks: Ranks
    prefix_ends: Tensor | None = None

    @cached_property
    def of_heads(self) -> tuple[Move, ...]:
        """Moves that assemble slices into the sequence shared by ranks with other heads."""
        return moves([self.cut.spans[rank] for rank in self.ranks.with_other_heads])

    @cached_property
    def of_others(self) -> tuple[Move, ...]:
        """Moves that assemble those sequences into the whole one."""
        return moves(self._slices)

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks(self._slices, self.ranks.along.rank, self.starts, self.lowest)

    @property
    def own(self) -> tuple[Span, ...]:
        """Spans of this rank's queries after heads are exchanged."""
        return self._slices[self.ranks.along.rank]

    @cached_property
    def own_ends(self) -> tuple[Tensor | None, ...]:
        """Ends of the prefixes of these queries, of each span."""
        ends = self.prefix_ends
        return tuple(None if ends is None else ends[:, start:stop] for start, stop in self.own)

    @cached_property
    def _slices(self) -> tuple[tuple[Span, ...], ...]:
        each = self.ranks.heads.size
        return tuple(self.cut.of(range(at * each, (at + 1) * each)) for at in range(self.ranks.along.size))


class Ranks:
    """The ranks that cut sequences between them, and what their layers share of a batch.

    Args:
        everybody: numbered so that those who exchange heads are neighbours.
        heads: those who exchange heads, so that each has some of a longer slice.
        along: one of each of these, who share a sequence.
    """

    def __init__(self, everybody: Group, heads: Group, along: Group) -> None:
        self.everybody, self.heads, self.along = everybody, heads, along
        self._known: PerBatch[Sequences] = PerBatch()

    @property
    def with_other_heads(self) -> range:
        """Ranks of all, of those that this one exchanges heads with."""
        first = self.along.rank * self.heads.size
        return range(first, first + self.heads.size)

    def sequences(
        self, document_ids: Tensor | None, each: int, device: torch.device, prefix_ends: Tensor | None = None
    ) -> Sequences:
        """Return what is known of the batch with these ids, given in slices of `each` tokens, as ends of prefixes are;
        both are exchanged, and ids read from the device, once per batch."""
        return self._known(
            document_ids, (each, device), lambda: self._found(document_ids, each, prefix_ends), prefix_ends=prefix_ends
        )

    def _found(self, slices: Tensor | None, each: int, ends: Tensor | None) -> Sequences:
        ranks = self.everybody.size
        length = ranks * each
        starts, cut, lowest = None, head_tail(length, ranks), [0] * length
        if slices is not None:
            starts = gathered_starts(self._gathered(slices))
            if not is_imagined(starts):
                there = starts.cpu()
                cut, lowest = cut_of(there, length, ranks), there.amin(0).tolist()
        if ends is not None:
            places = [torch.arange(*span, device=ends.device) for own in cut.spans for span in own]
            ends = torch.empty_like(whole := self._gathered(ends)).index_copy(1, torch.cat(places), whole)
        return Sequences(cut, starts, lowest, self, ends)

    def _gathered(self, slices: Tensor) -> Tensor:
        """Slices of all ranks, `[batch, length]`, in the order of ranks."""
        return all_gather(slices, self.everybody).movedim(0, 1).flatten(1)


class ContextKernel:
    """A kernel, and around it what it takes to see whole sequences; see `AttentionKernel`.

    Args:
        kernel: computes.
        ranks: that cut sequences.
        inner: how ranks that have exchanged heads see what others have of the sequence.
    """

    def __init__(self, kernel: AttentionKernel, ranks: Ranks, inner: Inner) -> None:
        self.kernel, self.ranks, self._inner = kernel, ranks, inner

    @torch.compiler.disable(reason="what lies where depends on a batch's documents")  # type: ignore[untyped-decorator,no-untyped-call]
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
        """Of a slice of queries, keys and values, or of whole rows in `whole_rows`. Not compiled.

        Raises:
            ConfigError: for what can't be computed on slices: queries at other positions than keys, as with a cache.
        """
        if rows_are_whole():
            return self.kernel(query, key, value, options)
        if query.shape[1] != key.shape[1] or options.offset:
            raise ConfigError("parallel.cp: attention was asked for queries at other positions than its keys.")
        given = options.document_ids, query.shape[1], query.device, options.prefix_ends
        sequences = self.ranks.sequences(*given)
        options = replace(options, document_ids=sequences.starts, offset=None, prefix_ends=None)
        attend = self._along if self.ranks.heads.size == 1 else self._by_heads
        found = attend(query, key, value, sequences, options)
        return found if options.log_sum_exp else found[0]

    def _by_heads(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, options: AttentionOptions
    ) -> tuple[Tensor, ...]:
        """Some heads of a longer slice, for all heads of a shorter one (DeepSpeed Ulysses, arXiv:2309.14509)."""
        group, how = self.ranks.heads, sequences.of_heads
        key, value = (enough_heads(one, query.shape[2], group.size) for one in (key, value))
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.chunk(group.size)[group.rank])
        if (dropout := options.dropout) is not None:
            own = dropout._replace(heads=dropout.heads.chunk(group.size)[group.rank])
            options = replace(options, dropout=own)
        query, key, value = HeadsForSequence.apply(how, group, query, key, value)  # type: ignore[no-untyped-call]
        out, *sums = self._along(query, key, value, sequences, options)
        rows = [one.mT[..., None] for one in sums]
        out, *sums = SequenceForHeads.apply(how, group, out, *rows)  # type: ignore[no-untyped-call]
        return out, *(one[..., 0].mT for one in sums)

    def _along(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, options: AttentionOptions
    ) -> tuple[Tensor, ...]:
        """All keys of a sequence, for queries of a slice."""
        if self._inner == "ring":
            return self._passed_on(query, key, value, sequences, options)
        if self.ranks.along.size == 1:
            found = self.kernel(query, key, value, replace(options, prefix_ends=sequences.own_ends[0]))
            return found if options.log_sum_exp else (found,)
        return self._gathered(query, key, value, sequences, options)

    def _gathered(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, options: AttentionOptions
    ) -> tuple[Tensor, ...]:
        """With the keys and values of whole sequences on every rank (Llama 3, arXiv:2407.21783, §3.3.2)."""
        keys, values = GatherSequence.apply(key, value, sequences.of_others, self.ranks.along)  # type: ignore[no-untyped-call]
        found, at = [], 0
        for (start, stop), ends in zip(sequences.own, sequences.own_ends, strict=True):
            # Masks go by the ids of all, and a prefix may reach beyond its queries.
            kept = slice(stop if options.document_ids is None and ends is None else None)
            own, asked = query[:, at : at + stop - start], replace(options, offset=start, prefix_ends=ends)
            part = self.kernel(own, keys[:, kept], values[:, kept], asked)
            found.append(part if options.log_sum_exp else (part,))
            at += stop - start
        return tuple(torch.cat(parts, axis) for parts, axis in zip(zip(*found, strict=True), (1, 2), strict=False))

    def _passed_on(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """With blocks of keys and values that go round; a sink joins when all of them have."""
        sinks = options.sinks
        given = self.kernel, sequences.blocks, self.ranks.along, replace(options, sinks=None, log_sum_exp=True)
        out, sums = Ring.apply(query, key, value, *given)  # type: ignore[no-untyped-call]
        if sinks is not None:
            total = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None].expand_as(sums))
            out, sums = out * (sums - total).exp().mT[..., None].to(out.dtype), total
        return out, sums


def enough_heads(x: Tensor, heads: int, ranks: int) -> Tensor:
    """Keys or values with a head for each rank at least: heads are repeated where ranks are more.

    Raises:
        ConfigError: if heads can't be shared out.
    """
    if problem := undivided(heads, x.shape[2], ranks):
        raise ConfigError(problem)
    return x.repeat_interleave(max(ranks // x.shape[2], 1), dim=2)


def undivided(heads: int, kv_heads: int, ranks: int) -> str:
    """Why ranks can't share heads out, in a clause; empty if they can."""
    if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        return ""
    return f"{ranks} ranks can't share out query heads ({heads}) and heads of keys and values ({kv_heads})"

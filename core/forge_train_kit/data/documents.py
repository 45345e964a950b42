"""All documents of some shards, as one long text of tokens."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError

from .shard import Ids, Shard

Int64 = NDArray[np.int64]


class Documents:
    """Shards one after the other. Nothing is read before it is asked for.

    Args:
        shards: in order.
        digest: identifies the content; without one, a hash of the shards' sizes and of some of their tokens.
        vocabulary: of the tokenizer; ids beyond it are refused where rows are read. None for any.
    """

    def __init__(self, shards: Sequence[Shard], digest: str = "", *, vocabulary: int | None = None) -> None:
        self.vocabulary = vocabulary
        self.shards = [shard for shard in shards if len(shard.tokens)]
        self._starts = list(accumulate((len(shard.tokens) for shard in self.shards), initial=0))
        self._firsts = list(accumulate((len(shard.ends) for shard in self.shards), initial=0))
        self.tokens = self._starts[-1]
        self.count = self._firsts[-1]
        """Number of documents."""
        self.masked = any(shard.trained is not None for shard in self.shards)
        """True if some tokens are excluded from learning."""
        self.weighted = any(shard.trained is not None and shard.trained.dtype == np.float32 for shard in self.shards)
        """True if some tokens count more than others."""
        self._digest = digest

    @cached_property
    def digest(self) -> str:
        """Digest that identifies this content."""
        if self._digest:
            return self._digest
        found = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            found.update(f"{shard.tokens.dtype} {len(shard.tokens)} {len(shard.ends)} ".encode())
            for part in (shard.tokens[:4096], shard.tokens[:: max(1, len(shard.tokens) // 4096)], shard.ends[-64:]):
                found.update(np.ascontiguousarray(part).tobytes())
        return found.hexdigest()

    def take(self, start: int, out: Ids) -> None:
        """Copy the tokens from `start` on into `out`; what lies beyond the last token stays as it is."""
        at, stop, done = self._shard_of(start), min(start + len(out), self.tokens), 0
        while start + done < stop:
            inside = start + done - self._starts[at]
            piece = self.shards[at].tokens[inside : inside + stop - start - done]
            out[done : done + len(piece)] = piece
            done, at = done + len(piece), at + 1

    def check(self, read: Int64, spans: Iterable[tuple[int, int]]) -> None:
        """Refuse ids that the tokenizer has not: headers said that there are none, so a file was damaged since.

        Args:
            read: ids as they were read; their largest alone is looked at.
            spans: where they come from: first token, and number of tokens.

        Raises:
            ConfigError: naming the file and the position.
        """
        limit = self.vocabulary
        if limit is None or not read.size or read.max() < limit:
            return
        for start, count in spans:
            ids = np.zeros(count, np.int64)
            self.take(start, ids)
            if (bad := np.flatnonzero(ids >= limit)).size:
                at = self._shard_of(token := start + int(bad[0]))
                shard, inside = self.shards[at], token - self._starts[at]
                raise ConfigError(
                    f"{shard.path}: is damaged: token {shard.first + inside:,} is {ids[bad[0]]:,}, and the tokenizer "
                    f"has {limit:,} ids. Restore the file, or make it again."
                )

    def learned(self, start: int, out: NDArray[np.bool_]) -> None:
        """Write to `out` whether each token from `start` on is learned."""
        at, stop, done = self._shard_of(start), min(start + len(out), self.tokens), 0
        while start + done < stop:
            shard, inside = self.shards[at], start + done - self._starts[at]
            size = min(len(shard.tokens) - inside, stop - start - done)
            out[done : done + size] = True if shard.trained is None else shard.trained[inside : inside + size] != 0
            done, at = done + size, at + 1

    def weights(self, start: int, out: NDArray[np.float32]) -> None:
        """Write the weight of each token's loss from `start` on into `out`."""
        at, stop, done = self._shard_of(start), min(start + len(out), self.tokens), 0
        while start + done < stop:
            shard, inside = self.shards[at], start + done - self._starts[at]
            size = min(len(shard.tokens) - inside, stop - start - done)
            out[done : done + size] = 1 if shard.trained is None else shard.trained[inside : inside + size]
            done, at = done + size, at + 1

    def ends_within(self, start: int, stop: int) -> Int64:
        """Every place e, start < e ≤ stop, at which a document ends (exclusive)."""
        found, at = [], self._shard_of(start)
        while at < len(self.shards) and self._starts[at] < stop:
            base, ends = self._starts[at], self.shards[at].ends
            low, high = ends.searchsorted((start - base, stop - base), "right").tolist()
            found.append(ends[low:high] + base)
            at += 1
        return found[0] if len(found) == 1 else np.concatenate([*found, np.empty(0, np.int64)])

    def lengths(self) -> Int64:
        """Tokens of each document, `[documents]`."""
        return np.concatenate([np.diff(shard.ends, prepend=0) for shard in self.shards] or [np.empty(0, np.int64)])

    def span(self, document: int) -> tuple[int, int]:
        """Return the start and end of a document."""
        at = bisect_right(self._firsts, document) - 1
        base, inside, ends = self._starts[at], document - self._firsts[at], self.shards[at].ends
        return base + (int(ends[inside - 1]) if inside else 0), base + int(ends[inside])

    def path_of(self, document: int) -> Path:
        """Return the file that a document lies in."""
        return self.shards[bisect_right(self._firsts, document) - 1].path

    def where(self, token: int) -> str:
        """The file that a token lies in, and its place there, for messages."""
        at = self._shard_of(token)
        inside = token - self._starts[at]
        document = int(self.shards[at].ends.searchsorted(inside, "right"))
        return f"{self.shards[at].path}, document {document:,}, token {inside:,}"

    def _shard_of(self, token: int) -> int:
        return bisect_right(self._starts, token) - 1

"""Texts that come one after the other and can't be entered by number: rows of tokens, and an exact state.

Texts are shuffled in blocks, each by itself, so that what the shuffle buffer holds follows from where its block begins:
the state is a few numbers, and going on reads one block again.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from forge_train import MASKED, ConfigError
from forge_train.base.errors import ForgeError, describe
from forge_train_kit.tokenizer import Tokenizer

from .documents import Int64
from .permutation import permute
from .reading import SampleError, stage
from .rows import Arrays
from .tokenizers import encode_documents

_AT_A_TIME = 64
"""Texts that are tokenised together."""


class Source(Protocol):
    """This rank's texts, in an order that does not change."""

    def read(self, state: Mapping[str, Any] | None) -> Iterator[bytes]:
        """The texts from a state on, as UTF-8; from the first one without."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the place of the next text; JSON only."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """Texts that are shuffled together.

    Args:
        epoch: which time the source is read.
        number: of the block in its epoch.
        source: state of the source where the block begins; None at its beginning.
        digest: of the texts.
    """

    epoch: int
    number: int
    source: Mapping[str, Any] | None
    digest: str


@dataclass(slots=True)
class _Document:
    block: Block
    number: int
    """In the shuffled block."""
    ids: Int64
    used: int
    """Tokens that rows have taken."""


class StreamedRows:
    """Texts as one long text of tokens, cut every `sequence` tokens, epoch after epoch: no token is left out.

    Rows are as those of `SplitRows`; the text of the next epoch follows that of the last one.

    Args:
        source: of the texts.
        tokenizer: makes the tokens.
        sequence: tokens of a row.
        isolate: whether documents of one row are kept apart.
        buffer: texts of a block.
        seed: of the order in a block; None keeps the source's.
        key: the section that messages name.
        once: for held-out text: rows of padding, all labels masked, follow the last text.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        sequence: int,
        *,
        isolate: bool,
        buffer: int,
        seed: tuple[int, ...] | None,
        key: str,
        once: bool = False,
    ) -> None:
        self._once = once
        self._source, self._tokenizer, self._sequence, self._isolate = source, tokenizer, sequence, isolate
        self._buffer, self._seed, self._key = buffer, seed, key
        self.go_to(None)

    def go_to(self, place: Mapping[str, Any] | None) -> None:
        """Go to a place that `place` gave, or to the beginning."""
        self._from, self._reading = place, (0, 0)
        self._documents = self._read(place)
        self._waiting: deque[_Document] = deque()
        self._tokens = 0

    def place(self) -> dict[str, Any] | None:
        """Return the place of the next row; JSON only, None at the beginning."""
        if not self._waiting:
            return None if self._from is None else dict(self._from)
        first = self._waiting[0]
        return {"block": asdict(first.block), "document": first.number, "token": first.used}

    def take(self, rows: int) -> Arrays:
        """The next rows.

        Raises:
            ConfigError: there is no text, or it can't be read.
        """
        shape = rows, self._sequence + 1
        ids, positions, numbers = np.zeros(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64)
        filled = np.full((rows, 1), self._sequence + 1)
        for row in range(rows):
            self._fill(self._sequence + 1)
            at = 0
            for number, document in enumerate(self._waiting):
                piece = document.ids[document.used : document.used + self._sequence + 1 - at]
                here = slice(at, at + len(piece))
                ids[row, here], positions[row, here], numbers[row, here] = piece, np.arange(len(piece)), number
                at += len(piece)
                if at > self._sequence:
                    break
            filled[row], rest = at, self._sequence + 1 - at
            positions[row, at:], numbers[row, at:] = np.arange(rest), len(self._waiting)
            self._use(self._sequence)
        inputs, labels = ids[:, :-1].copy(), ids[:, 1:].copy()
        labels[np.arange(1, self._sequence + 1) >= filled] = MASKED
        if not self._isolate:
            return Arrays(inputs, labels)
        labels[numbers[:, 1:] != numbers[:, :-1]] = MASKED
        return Arrays(inputs, labels, positions[:, :-1].copy(), numbers[:, :-1].copy())

    def drop(self, rows: int) -> None:
        """Leave out the next rows."""
        for _ in range(rows):
            self._fill(self._sequence + 1)
            self._use(self._sequence)

    def _fill(self, tokens: int) -> None:
        while self._tokens < tokens:
            document = self._next()
            if document is None:
                return
            self._waiting.append(document)
            self._tokens += len(document.ids) - document.used

    def _next(self) -> _Document | None:
        try:
            return next(self._documents, None)
        except ForgeError:  # which says what there is to say
            raise
        except Exception as error:
            epoch, block = self._reading
            raise SampleError(
                f"{self._key}: a document in block {block:,} (of {self._buffer:,} each) of epoch {epoch:,} can't be "
                f"read: stage {getattr(error, 'stage', 'read')}: {describe(error)}"
            ) from error

    def _use(self, tokens: int) -> None:
        """Take tokens away; as long as there is more text one stays, which tells where the next row begins."""
        tokens = min(tokens, self._tokens)
        self._tokens -= tokens
        while self._waiting and tokens >= (left := len(self._waiting[0].ids) - self._waiting[0].used):
            tokens -= left
            self._waiting.popleft()
        if self._waiting:
            self._waiting[0].used += tokens

    def _read(self, place: Mapping[str, Any] | None) -> Iterator[_Document]:
        """All documents from a place on, without end."""
        known = Block(**place["block"]) if place else Block(0, 0, None, "")
        document, token = (place["document"], place["token"]) if place else (0, 0)
        while True:
            found = False
            digest = known.digest
            for block, texts in self._blocks(known):
                if digest and digest != block.digest:
                    break
                digest = ""
                for number, ids in self._encoded(texts, document):
                    found = True
                    yield _Document(block, number, ids, token)
                    token = 0
                document = 0
            if digest:
                raise ConfigError(
                    f"{self._key}: the data set is not the one this state was saved with: its records changed. "
                    "Restore them, or start a new run from the checkpoint's weights (train.init_from)."
                )
            if self._once:
                return
            if not found and known.source is None and not known.number:
                raise ConfigError(
                    f"{self._key}: a data rank finds no text: there are fewer than data ranks, or too few held out."
                )
            known = Block(known.epoch + 1, 0, None, "")

    def _blocks(self, first: Block) -> Iterator[tuple[Block, list[bytes]]]:
        """The blocks of an epoch from one of them on, each with its texts in their shuffled order."""
        texts, source = self._source.read(first.source), first.source
        for number in itertools.count(first.number):
            self._reading = first.epoch, number
            block = list(itertools.islice(texts, self._buffer))
            if not block:
                return
            content = hashlib.blake2b(digest_size=16)
            for text in block:
                content.update(hashlib.blake2b(text, digest_size=16).digest())
            made = Block(first.epoch, number, source, content.hexdigest())
            source = self._source.state()  # before anything is yielded: meanwhile the source may be read elsewhere
            if self._seed is not None:
                words = np.random.SeedSequence((*self._seed, first.epoch, number)).generate_state(1, np.uint64)
                at = np.arange(len(block), dtype=np.int64)
                block = [block[one] for one in permute(at, np.zeros_like(at), len(block), int(words[0])).tolist()]
            yield made, block

    def _encoded(self, texts: list[bytes], first: int) -> Iterator[tuple[int, Int64]]:
        """Number and ids of each text from one on; those without tokens left out."""
        begin = np.array(self._tokenizer.begin, np.int64)
        end = np.array([] if self._tokenizer.end is None else [self._tokenizer.end], np.int64)
        for start in range(first, len(texts), _AT_A_TIME):
            with stage("tokenise"):
                encoded = encode_documents(self._tokenizer, texts[start : start + _AT_A_TIME])
            for number, ids in enumerate(encoded, start):
                if len(ids):
                    yield number, np.concatenate([begin, ids, end]).astype(np.int64)

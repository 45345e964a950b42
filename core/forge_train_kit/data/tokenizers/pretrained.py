"""Tokenizers of Hugging Face's `tokenizers` library, and the special tokens of the models they came with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError
from forge_train.base.errors import describe

from ...lfs import pointer
from . import special
from .converted import converted
from .literals import Literals
from .parts import PART, parts

Ids = NDArray[np.unsignedinteger]

FILE = "tokenizer.json"
END_NAMES = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<eos>",
    "[EOS]",
    "<|eot_id|>",
    "<|im_end|>",
)
"""Names of the token that ends a document; the first one found is taken if no file names it."""
SERIAL = "TOKENIZERS_PARALLELISM"
"""Environment variable that lets the library start threads; `false` in a process with one core."""


class PretrainedTokenizer:
    """A `tokenizer.json` of Hugging Face's `tokenizers`, with what the files beside it say about special tokens.

    Where a folder has none, it is the tokenizer that transformers makes of the folder's other files.

    Truncation and padding in the file are switched off. Special tokens are not added by `encode`; `begin` is what the
    file's post-processor puts before a text. As in transformers 5, it alone decides that: `add_bos_token` in
    `tokenizer_config.json` is for tokenizers without a `tokenizer.json`.

    Args:
        path: a folder, or a `tokenizer.json`. A file of another name is taken alone.

    Raises:
        ConfigError: the file can't be read or is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        file, added, named = path / FILE if path.is_dir() else path, list[str](), None
        if path.is_dir() and not file.is_file():
            self._tokenizer, named = converted(path)
            content = self._tokenizer.to_str().encode()
        else:
            content = _content(file)
            try:
                self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
            except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
                raise ConfigError(
                    f"tokenizer.path: {file} is no tokenizer of the tokenizers library: {describe(error)}"
                ) from error
            if file.name == FILE:
                added = self._add_tokens(file.parent)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.begin, after = self._post_processor()
        # It has said what it adds; left in, byte-level ones trim the whitespace off a token's offsets.
        self._tokenizer.post_processor = tokenizers.processors.Sequence([])
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise ConfigError(f"tokenizer.path: {file} has an empty vocabulary")
        self.vocabulary: int = max(ids.values()) + 1
        end, stops = None, tuple[int, ...]()
        if file.name == FILE:
            end, stops = special.ends(file.parent, self._tokenizer.token_to_id, self.vocabulary)
            if special.splits(file.parent):
                self._tokenizer.encode_special_tokens = True
                added.append("split_special_tokens")
        guess = next((ids[name] for name in END_NAMES if name in ids), None)
        self.end: int | None = next((id for id in (end, *after, named, guess) if id is not None), None)
        self.stops = tuple(dict.fromkeys([*([] if self.end is None else [self.end]), *stops]))
        digest = hashlib.blake2b(content, digest_size=16)
        digest.update(repr((self.begin, self.end, added)).encode())
        self.digest = digest.hexdigest()

    def _post_processor(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the file's post-processor puts before a text and after it."""
        for probe in ("a", " ", "0"):
            inner = self._tokenizer.encode(probe, add_special_tokens=False).ids
            outer = self._tokenizer.encode(probe).ids
            starts = [at for at in range(len(outer)) if inner and outer[at : at + len(inner)] == inner]
            if starts:
                return tuple(outer[: starts[-1]]), tuple(outer[starts[-1] + len(inner) :])
        return (), ()

    def _add_tokens(self, folder: Path) -> list[str]:
        """Add or change the tokens that the files beside `tokenizer.json` list, as transformers does."""
        here = self._tokenizer.get_added_tokens_decoder()
        same, contents = {repr(token) for token in here.values()}, {token.content for token in here.values()}
        chosen, listed = list[Any](), special.added_tokens(folder)
        for id, token, file in listed:
            if file.name == special.ADDED_TOKENS and id in here and here[id].content == token.content:
                continue  # its flags are those of tokenizer.json
            if token.content not in contents if id is None else repr(token) not in same:
                chosen.append(token)
                contents.add(token.content)
        special.check_end(
            folder, {*self._tokenizer.get_vocab(), *(token.content for id, token, _ in listed if id is not None)}
        )
        self._tokenizer.add_tokens(chosen)
        for id, token, file in listed:
            if id is not None and (found := self._tokenizer.token_to_id(token.content)) != id:
                raise ConfigError(f"{file}: token {token.content!r} has id {id}; here it is {found}")
        return [repr(token) for token in chosen]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens by their text."""
        return tuple(one.content for one in self._tokenizer.get_added_tokens_decoder().values() if one.special)

    def encode_with_literals(
        self, text: str, literal: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and the characters of each, where special tokens in the spans `literal` are text like any other.

        Raises:
            ConfigError: the tokenizer takes no other names for its special tokens.
        """
        if self._tokenizer.encode_special_tokens:
            return self.encode_with_offsets(text)
        return self._literals.encode(text, literal)

    @cached_property
    def _literals(self) -> Literals:
        return Literals(self._tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def special(self, id: int) -> str:
        """The text of a special token; empty for other tokens."""
        added = self._tokenizer.get_added_tokens_decoder().get(id)
        return added.content if added is not None and added.special else ""

    def encode_documents(self, documents: Sequence[bytes]) -> list[Ids]:
        """Token ids of UTF-8 texts, one array each, without the end; all of the library's threads work on it."""
        found: list[list[Ids]] = [[] for _ in documents]
        numbered = ((number, part) for number, document in enumerate(documents) for part in parts(document, self._ids))
        for number, ids in self._encode(numbered):
            found[number].append(ids)
        return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in found]

    def _encode(self, numbered: Iterable[tuple[int, tuple[str, int]]]) -> Iterator[tuple[int, Ids]]:
        """The number and the token ids of each part; so many at a time as the library's threads have to do, not all."""
        serial = os.environ.get(SERIAL) == "false"
        most = PART * (1 if serial else int(os.environ.get("RAYON_NUM_THREADS") or os.cpu_count() or 1))
        waiting: list[tuple[int, tuple[str, int]]] = []
        size = 0
        for one in chain(numbered, [None]):
            if one is not None:
                waiting.append(one)
                size += len(one[1][0])
            if size >= most or one is None:
                encoded = self._tokenizer.encode_batch_fast(
                    [text for _, (text, _) in waiting], add_special_tokens=False
                )
                for (number, (_, foreign)), encoding in zip(waiting, encoded, strict=True):
                    yield number, np.array(encoding.ids, np.uint32)[foreign:]
                waiting, size = [], 0

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def _content(file: Path) -> bytes:
    """The bytes of a tokenizer's file.

    Raises:
        ConfigError: it can't be read, or is the pointer that Git LFS leaves in place of a file.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"tokenizer.path: {file} can't be read: {error.strerror}") from error
    if reason := pointer(content):
        raise ConfigError(f"tokenizer.path: {file} {reason}")
    return content

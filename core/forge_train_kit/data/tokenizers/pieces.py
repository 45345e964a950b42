"""Tokenizers of the SentencePiece library: `tokenizer.model` files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError
from forge_train.base.errors import describe

from ...lfs import pointer
from . import special

SUFFIX = ".model"
FILE = f"tokenizer{SUFFIX}"


class PieceTokenizer:
    """A SentencePiece model.

    `begin` and `end` are the model's BOS and EOS, if it has them. In a folder, `add_bos_token = false` in
    `tokenizer_config.json` takes the BOS away, and the files there may name other ends, as for a `tokenizer.json`.
    Normalisation is the model's own, so that `decode` may give another text. Control pieces, such as `</s>`, are never
    made of text; user-defined pieces are.

    Args:
        path: a folder with a `tokenizer.model`, or a file, which is taken alone.

    Raises:
        ConfigError: the library is missing; the file can't be read or is no model; the folder adds tokens that the
            model has not, or has a chat template, whose control pieces would be spelled.
    """

    def __init__(self, path: Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise ConfigError(
                f"tokenizer.path: {path} needs sentencepiece to be read: pip install 'forge-train[data]'."
            ) from error
        folder, file = (path, path / FILE) if path.is_dir() else (None, path)
        try:
            content = file.read_bytes()
            if reason := pointer(content):
                raise ConfigError(f"tokenizer.path: {file} {reason}")
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
            self.vocabulary: int = self._model.get_piece_size()
        except OSError as error:
            raise ConfigError(f"tokenizer.path: {file} can't be read: {error.strerror}") from error
        except RuntimeError as error:
            raise ConfigError(f"tokenizer.path: {file} is no SentencePiece model: {describe(error)}") from error
        if not self.vocabulary:
            raise ConfigError(f"tokenizer.path: {file} is no SentencePiece model: it is empty.")
        begin, end = (None if id < 0 else int(id) for id in (self._model.bos_id(), self._model.eos_id()))
        stops: tuple[int, ...] = ()
        if folder:
            if problem := self._problem(folder):
                raise ConfigError(problem)
            if not special.adds_begin(folder):
                begin = None
            named, stops = special.ends(folder, self._id, self.vocabulary)
            end = end if named is None else named
        self.begin: tuple[int, ...] = () if begin is None else (begin,)
        self.end: int | None = end
        self.stops = tuple(dict.fromkeys([*([] if end is None else [end]), *stops]))
        self._controls = [self._model.id_to_piece(id) for id in range(self.vocabulary) if self._model.is_control(id)]
        digest = hashlib.blake2b(content, digest_size=16)
        digest.update(repr((self.begin, self.end)).encode())
        self.digest = digest.hexdigest()

    def _problem(self, folder: Path) -> str:
        """The reason why the model alone is not the tokenizer of a folder; empty if it is."""
        for id, token, where in special.added_tokens(folder):
            if id is not None and self._id(token.content) != id:
                return (
                    f"{where}: adds the token {token.content!r}, which {FILE} has not. With transformers, "
                    f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(NEW) writes a tokenizer.json "
                    "with both."
                )
        config = folder / special.TOKENIZER_CONFIG
        if special.table(config).get("chat_template") or (folder / "chat_template.jinja").is_file():
            return (
                f"{folder}: has a chat template, and no file says of which class the tokenizer is, so special tokens "
                f"in it would be spelled in pieces; set tokenizer_class in {config}, such as LlamaTokenizer."
            )
        return ""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and the characters of each.

        Raises:
            ConfigError: a conversation holds the name of a control piece, which would be spelled in pieces.
        """
        if spelled := next((name for name in self._controls if name in text), ""):
            raise ConfigError(
                f"the text holds {spelled!r}, which a SentencePiece model alone spells in pieces; set tokenizer.path "
                "to a folder whose tokenizer_config.json has its tokenizer_class, such as LlamaTokenizer."
            )
        found = self._model.encode_as_offset_mapping(text)
        offsets: list[tuple[int, int]] = list(found["offsets"])
        for at in reversed(range(len(offsets) - 1)):  # of the pieces of one character, the last has it
            start, stop = offsets[at]
            if start == stop == offsets[at + 1][0]:
                offsets[at] = offsets[at + 1]
        return list(found["ids"]), offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Text without control pieces."""
        known = [int(id) for id in ids if 0 <= id < self.vocabulary and not self._model.is_control(int(id))]
        text: str = self._model.decode(known)
        return text

    def special(self, id: int) -> str:
        """The name of a control piece; empty for other ones."""
        return str(self._model.id_to_piece(id)) if self._model.is_control(id) else ""

    def encode_documents(self, documents: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        """Ids of UTF-8 texts, one array each, without the end; all cores work on it."""
        texts = [document.decode("utf-8") for document in documents]
        return [np.asarray(ids, np.uint32) for ids in self._model.encode(texts, num_threads=-1)]

    def _id(self, piece: str) -> int | None:
        id = int(self._model.piece_to_id(piece))
        return id if self._model.id_to_piece(id) == piece else None

"""Tokenizers, opened by what a configuration or an argument names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge_train import ConfigError
from forge_train_kit.tokenizer import Tokenizer

from ..encoders import DocumentEncoder

if TYPE_CHECKING:
    from ..shard import Ids

BYTES = "bytes"


def open_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of `bytes`, of a `tokenizer.json` or a SentencePiece `.model`, or of a model's folder.

    Of a folder, `tokenizer.json` is read; without one, transformers reads the other files if a file names the
    tokenizer's class or the model's type; else a `tokenizer.model` is taken alone.

    Raises:
        ConfigError: there is no such file, or it is no tokenizer.
    """
    if path == BYTES:
        from .byte import ByteTokenizer

        return ByteTokenizer()
    from . import converted, pieces, pretrained

    place = Path(path).expanduser()
    if place.suffix == pieces.SUFFIX and not place.is_dir():
        return pieces.PieceTokenizer(place)
    alone = (place / pieces.FILE).is_file() and not (place / pretrained.FILE).is_file()
    if alone and not converted.names_class(place):
        return pieces.PieceTokenizer(place)
    return pretrained.PretrainedTokenizer(place)


def encode_documents(tokenizer: Tokenizer, documents: Sequence[bytes]) -> Sequence[Ids]:
    """Ids of UTF-8 texts, all at once where the tokenizer can.

    Raises:
        ConfigError: an id is not below the tokenizer's vocabulary.
    """
    import numpy as np

    if isinstance(tokenizer, DocumentEncoder):
        return tokenizer.encode_documents(documents)
    encoded = [np.asarray(tokenizer.encode(document.decode("utf-8")), np.int64) for document in documents]
    if (largest := max((int(ids.max()) for ids in encoded if len(ids)), default=0)) >= tokenizer.vocabulary:
        raise ConfigError(f"The tokenizer gave the id {largest}, and says that it has {tokenizer.vocabulary}.")
    return encoded

"""Tokenizers, opened by what a configuration or an argument names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_train import Tokenizer

BYTES = "bytes"


def open_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of `bytes`, of a `tokenizer.json`, or of the folder it lies in.

    Raises:
        ConfigError: there is no such file, or it is no tokenizer.
    """
    if path == BYTES:
        from .byte import ByteTokenizer

        return ByteTokenizer()
    from .pretrained import PretrainedTokenizer

    return PretrainedTokenizer(Path(path).expanduser())

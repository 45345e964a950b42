"""Stand-ins for what the `text` plugin reads of a job, and small corpora."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_plugins.data._text.corpus import Split
from forge_train_plugins.data.text import Text


class Shown(logging.Handler):
    """Whether each line of progress passes, and the line."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[bool, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((getattr(record, "passing", False), record.getMessage()))


def job(
    *, sequence: int = 8, micro_batch: int = 2, rank: int = 0, ranks: int = 1, seed: int = 0, tokenizer: Any = None
) -> Any:
    def call(spec: Any, arguments: Any) -> Any:
        return (tokenizer or ByteTokenizer()) if spec.name == "tokenizer" else []

    return SimpleNamespace(
        hooks=SimpleNamespace(call=call),
        config=SimpleNamespace(train=SimpleNamespace(sequence=sequence, micro_batch=micro_batch, evaluate_every=0)),
        dist=SimpleNamespace(data_rank=rank, data_ranks=ranks),
        device=torch.device("cpu"),
        seed=seed,
    )


def stream(lengths: Iterable[int]) -> Split:
    """Documents of so many tokens; the tokens count up, so that each tells its place."""
    ends = np.cumsum(list(lengths), dtype=np.int64)
    return Split(np.arange(ends[-1], dtype=np.uint32), ends, int(ends[-1]))


def plugin(cache: Path, path: Path | str | tuple[str, ...], **options: Any) -> Text:
    where = path if isinstance(path, tuple) else str(path)
    return Text(Text.Config(path=where, cache=str(cache), **options))


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def prose(seed: int, words: int = 60) -> str:
    """Words of one to nine letters, in lines."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("aaabcdeeeefghiiilmnoooprstu"))
    text = " ".join("".join(rng.choice(letters, rng.integers(1, 10))) for _ in range(words))
    return "\n".join(text[i : i + 40] for i in range(0, len(text), 40)) + "\n"

"""A tokenizer of one's own: byte-level BPE (Sennrich et al. 2016; bytes as in Radford et al. 2019), on a sample."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from forge_train import ConfigError

from ..tokenizers.parts import PART
from .encoding import documents
from .pool import end_with_parent
from .progress import Report
from .tasks import Preparation, Task

SAMPLE = 64 << 20
"""Bytes of text that it is trained on at most, taken evenly from all of it."""
END = "<|endoftext|>"
LEAST = 257
"""Token ids: all bytes, and the end of a document."""


def check(wanted: Preparation) -> None:
    """Refuse too small a vocabulary."""
    if wanted.train_tokenizer < LEAST:
        raise ConfigError(
            f"--train-tokenizer: {wanted.train_tokenizer} ids are too few; there are 256 bytes and an end."
        )


def train(wanted: Preparation, tasks: list[Task], folder: Path, report: Report) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, whole or not at all,
    in a process of its own, whose memory ends with it.

    Raises:
        ConfigError: the text can't be read, or the process died.
    """
    report.say("training the tokenizer")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as process:
        try:
            process.submit(_train, wanted, tasks, folder).result()
        except BrokenProcessPool as error:
            raise ConfigError("--train-tokenizer: the training died: was memory short?") from error


def _train(wanted: Preparation, tasks: list[Task], folder: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        _sample(wanted, tasks), vocab_size=wanted.train_tokenizer, special_tokens=[END], show_progress=False
    )
    part = folder.with_name(f".{folder.name}.part")
    part.mkdir(exist_ok=True)
    tokenizer.save(str(part / "tokenizer.json"))
    table = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (part / "tokenizer_config.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
    part.replace(folder)


def _sample(wanted: Preparation, tasks: list[Task]) -> Iterator[str]:
    """Texts from the beginning of each piece, the same share of each; long ones in parts, which bounds memory."""
    pieces = [piece for task in tasks for piece in task.pieces]
    share = min(1.0, SAMPLE / max(sum(piece.part.bytes for piece in pieces), 1))
    for piece in pieces:
        room = share * piece.part.bytes
        for document in documents(piece, wanted.field_of(piece.file)):
            if room <= 0:
                break
            text = document[: int(room) + 1].decode("utf-8", errors="ignore")
            yield from (text[at : at + PART] for at in range(0, len(text), PART))
            room -= len(document)

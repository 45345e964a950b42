"""The place of answers: a file, or memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from forge_train.plugin.job import Job

from ..inference.output_file import OutputFile
from .answers import Answer

PAUSE = 1.0
"""Seconds between two writes."""


@contextmanager
def opened(
    path: Path | None, made_of: dict[str, str], job: Job, told: Callable[[str], None]
) -> Iterator[tuple[OutputFile | None, int]]:
    """The file, on the main process if there is one, and how many answers it has.

    Raises:
        ConfigError: it is there, or what was begun has other content.
    """
    here: list[OutputFile] = []
    with ExitStack() as stack:

        def begin() -> int:
            if path is None:
                return 0
            here.append(stack.enter_context(OutputFile.open(path, made_of, told)))
            return here[0].done

        done = job.dist.on_main(begin)
        yield (here[0] if here else None), done


class Answers:
    """The answers of this call, in their order.

    Args:
        out: the file; None without one, and on all processes but the main one.
        keep: whether to keep them in memory.
        samples: answers to each prompt.
        total: answers that there will be.
        told: is given a line about how far it is.
    """

    def __init__(
        self, out: OutputFile | None, samples: int, total: int, told: Callable[[str], None], *, keep: bool
    ) -> None:
        self._out, self._samples, self._total, self._told, self._keep = out, samples, total, told, keep
        self._began = self._last = time.monotonic()
        self._lines: list[dict[str, Any]] = []
        self.kept: list[Answer] = []
        self.tokens = 0
        """Number of generated tokens."""
        self.cut = 0
        """Number of answers to prompts that were cut."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def add(self, answer: Answer) -> None:
        """Take an answer; it is on disk about a second later.

        Raises:
            DiskError: the disk refuses.
        """
        self.tokens += answer.tokens
        self.cut += bool(answer.cut)
        if self._keep:
            self.kept.append(answer)
        elif self._out is not None:
            self._lines.append(answer.line(self._samples))
            if time.monotonic() - self._last >= PAUSE:
                self._write(self._out)

    def finish(self) -> None:
        """Give the file its name."""
        if self._out is not None:
            self._write(self._out)
            self._out.finish()

    def _write(self, out: OutputFile) -> None:
        out.add(self._lines)
        self._lines.clear()
        self._last = time.monotonic()
        speed = self.tokens / max(self.seconds, 1e-9)
        self._told(f"{out.done:,} of {self._total:,} answers · {speed:,.0f} tokens/s")

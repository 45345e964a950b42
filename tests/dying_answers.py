"""A plugin whose process dies after its second write of answers: killed at the same place, whatever the machine does.

Answers are written as they come, not each second.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from forge_train import Plugin, hookimpl
from forge_train_tools.generation import writing
from forge_train_tools.inference.output_file import OutputFile

WRITES = 2
_add, _seen = OutputFile.add, itertools.count(1)


class Dies(Plugin):
    """To import this module where answers are written is enough."""

    api = (1, 0)

    @hookimpl
    def intervene(self, job: Any) -> None: ...


def _add_and_die(self: OutputFile, lines: Any) -> None:
    _add(self, lines)
    if next(_seen) == WRITES:
        os.kill(os.getpid(), signal.SIGKILL)


writing.PAUSE = 0.0
OutputFile.add = _add_and_die  # type: ignore[method-assign]

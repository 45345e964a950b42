"""How one of several processes ends that failed."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

from forge_train.ground.errors import ConfigError
from forge_train.ground.world import World


def part(code: int) -> None:
    """End here and now if this is one of several processes; gives back control if it is the only one.

    What failed still holds its process groups. Python, when it shuts down, takes the interpreter away from their
    threads, and a thread of gloo that asks for it then ends the process by SIGABRT, whatever its exit code was.
    """
    with suppress(ConfigError):  # which is what failed
        if World.here().size > 1:
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            os._exit(code)

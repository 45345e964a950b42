"""Exit of one of several processes after a failure."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

from forge_train.base.errors import ConfigError
from forge_train_tools.launching.world import here


def part(code: int) -> None:
    """End immediately if this is one of several processes; returns if it is the only one.

    The failed code still holds its process groups. When Python shuts down, it takes the interpreter away from their
    threads. A gloo thread that asks for it then ends the process by SIGABRT, whatever its exit code was.
    """
    with suppress(ConfigError):  # the failure that ends this process
        if here().size > 1:
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            os._exit(code)

"""The only place that turns the failure of a command into a message and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import click

from forge_train.base.errors import ForgeError, shortened
from forge_train_tools.messages import RED, explain, folded, show_warnings, styled

KILLED_BY_CTRL_C = 130


def ending(command: Callable[[], object]) -> int:
    """Run a command; returns the exit code for the process."""
    show_warnings()
    try:
        result = command()
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        click.echo(shortened(shown.getvalue()), err=True, nl=False)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return KILLED_BY_CTRL_C
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of a pipe is gone: `forge runs list | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 1
        return report(error)
    except Exception as error:
        return report(error)
    return result if isinstance(result, int) else 0


def report(error: Exception, log: Path | None = None) -> int:
    """Report on stderr what went wrong; returns the exit code.

    Args:
        error: a user's mistake (one message), or a failure of a plugin, torch or the machine.
        log: the file that holds the traceback.
    """
    if os.environ.get("FORGE_TRACEBACK") == "1":
        click.echo("".join(traceback.format_exception(error)), err=True)
    if isinstance(error, ForgeError):
        complain(str(error))
        return error.code
    complain(explain(error, log))
    return 1


def complain(text: str) -> None:
    """Show an error."""
    shown = folded(f"Error: {text}", sys.stderr)
    click.echo(styled("Error:", RED, sys.stderr) + shown.removeprefix("Error:"), err=True)

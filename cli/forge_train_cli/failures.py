"""The one place that turns what ends a command into a message and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import click

from forge_train.errors import ForgeError, explain

KILLED_BY_CTRL_C = 130


def ending(command: Callable[[], object]) -> int:
    """Run a command; what the process should exit with."""
    show_warnings()
    try:
        result = command()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return KILLED_BY_CTRL_C
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of a pipe left: `forge runs list | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 1
        return report(error)
    except Exception as error:
        return report(error)
    return result if isinstance(result, int) else 0


def report(error: Exception, log: Path | None = None) -> int:
    """Say on stderr what went wrong; the exit code.

    Args:
        error: a mistake of the user's (one message), or a failure of a plugin, torch or the machine.
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
    click.echo(f"{click.style('Error:', fg='red', bold=True)} {text}", err=True)


class _Screen(logging.Handler):
    """Warnings on whatever stderr is at the moment: a live view puts its own there."""

    def emit(self, record: logging.LogRecord) -> None:
        colour = "yellow" if record.levelno < logging.ERROR else "red"
        label = click.style(f"{record.levelname.capitalize()}:", fg=colour)
        text = f"{label} {record.getMessage()}"
        if record.exc_info and record.exc_info[1]:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        click.echo(text, file=sys.stderr)


def show_warnings() -> None:
    """Have forge's warnings on the screen, and what is less than that in a run's log only."""
    log = logging.getLogger("forge_train")
    log.setLevel(logging.INFO)
    log.propagate = False
    if not any(isinstance(handler, _Screen) for handler in log.handlers):
        screen = _Screen(logging.WARNING)
        screen.addFilter(lambda record: getattr(record, "screen", True))
        log.addHandler(screen)

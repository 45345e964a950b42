"""The one place that turns what ends a command into a message and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import click

from forge_train.ground.errors import ForgeError, explain

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


class _Progress(logging.Handler):
    """How far something is: on a terminal one line that is written over, elsewhere what is said when it is done."""

    def emit(self, record: logging.LogRecord) -> None:
        if not sys.stdout.isatty():
            if not getattr(record, "passing", False):
                click.echo(record.getMessage())
            return
        width = shutil.get_terminal_size().columns - 1
        text = click.style(record.getMessage()[:width].ljust(width), dim=True)
        click.echo(f"\r{text}\r", nl=not getattr(record, "passing", False))


def show_progress() -> None:
    """Have the progress of what takes long before the first step on the screen."""
    log = logging.getLogger("forge_train.progress")
    log.propagate = False  # a run's log has the end of it only
    if not log.handlers:
        log.addHandler(_Progress(logging.INFO))


def show_warnings() -> None:
    """Have forge's warnings on the screen, and what is less than that in a run's log only."""
    log = logging.getLogger("forge_train")
    log.setLevel(logging.INFO)
    log.propagate = False
    if not any(isinstance(handler, _Screen) for handler in log.handlers):
        screen = _Screen(logging.WARNING)
        screen.addFilter(lambda record: getattr(record, "screen", True))
        log.addHandler(screen)

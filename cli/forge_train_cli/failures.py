"""The only place that turns the failure of a command into a message and an exit code."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import click

from forge_train.base.errors import ForgeError, explain, shortened

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
    click.echo(f"{click.style('Error:', fg='red', bold=True)} {text}", err=True)


class _Screen(logging.Handler):
    """Writes warnings to the current stderr, which a live view replaces by its own."""

    def emit(self, record: logging.LogRecord) -> None:
        colour = "yellow" if record.levelno < logging.ERROR else "red"
        label = click.style(f"{record.levelname.capitalize()}:", fg=colour)
        text = f"{label} {record.getMessage()}"
        if record.exc_info and record.exc_info[1]:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        click.echo(text, file=sys.stderr)


class _Progress(logging.Handler):
    """Progress: on a terminal one line that is overwritten, elsewhere only the final message."""

    def emit(self, record: logging.LogRecord) -> None:
        if not sys.stdout.isatty():
            if not getattr(record, "passing", False):
                click.echo(record.getMessage())
            return
        width = shutil.get_terminal_size().columns - 1
        text = click.style(record.getMessage()[:width].ljust(width), dim=True)
        click.echo(f"\r{text}\r", nl=not getattr(record, "passing", False))


def show_progress() -> None:
    """Show the progress of slow work before the first step on the screen."""
    log = logging.getLogger("forge_train.progress")
    log.propagate = False  # a run's log gets only its end
    if not log.handlers:
        log.addHandler(_Progress(logging.INFO))


def show_warnings() -> None:
    """Show forge's warnings on the screen; lesser messages go only into a run's log."""
    log = logging.getLogger("forge_train")
    log.setLevel(logging.INFO)
    log.propagate = False
    if not any(isinstance(handler, _Screen) for handler in log.handlers):
        screen = _Screen(logging.WARNING)
        screen.addFilter(lambda record: getattr(record, "screen", True))
        log.addHandler(screen)

"""Transcripts of commands in the documentation: each page is a script, which is typed again and compared.

The files of a page (blocks with a title) are written. Its commands (`$ forge …` in blocks of `console`, and programs
between `$ python - <<'END'` and `END`) are run, in a folder of their own. A block shows those lines of the output that
its author chose, with `…` for what is left out; `^C` is a Ctrl-C at the first line of a step. Commands of other
programs are left as they are.

Numbers differ between machines. What stands around them does not, so only that is compared.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from matching import INTERRUPT, StaleError, matched

from forge_train_cli.app import run

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r'^```(?:console|\w+ title="([^"]+)")\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PYTHON = "python - <<'END'"
FEWER = (
    ("steps = 60", "steps = 4"),
    ("steps=60", "steps=4"),
    ("every = 30", "every = 2"),
    ("step-00000030", "step-00000002"),
)
"""What a check changes in files and commands, so that it is over in seconds."""


@dataclass(frozen=True)
class Session:
    """How the script of a page is run.

    Args:
        before: makes what the page takes for granted, in the current folder.
        folder: where the page's files go.
        few: `FORGE_SET` of a check, again for its sake.
        slow: commands that a check leaves out, as a pattern.
        never: commands that only serve as an example, as a pattern.
    """

    before: Callable[[], None] = lambda: None
    folder: str = "."
    few: str = "log.every=2;train.evaluate_batches=1"
    slow: str = r"(?!)"
    never: str = r"(?!)"


# -- pages ------------------------------------------------------------------------------------------------------------


def written(page: str, text: str, *, quick: bool = False) -> str:
    """The page with the lines that its commands print now.

    Args:
        page: its path in `docs/`.
        text: what it says so far.
        quick: take fewer steps, and leave out slow commands. The numbers are then worth nothing.

    Raises:
        StaleError: what the page shows is not printed; it names every such command, with what it prints.
    """
    session = SESSIONS[page]
    parts, end = [], 0
    stale: list[str] = []
    with _place(session, quick=quick):
        for found in BLOCK.finditer(text):
            parts.append(text[end : found.start(2)])
            end = found.end(2)
            parts.append(_write(session, found, quick) if found[1] else _type(session, found[2], stale, quick))
    if stale:
        raise StaleError(f"{page}: " + "\n\n".join(stale))
    return "".join([*parts, text[end:]])


def _write(session: Session, found: re.Match[str], quick: bool) -> str:
    file = Path(session.folder, found[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    before, as_before, added = found[2].partition("    ...  # as before\n")
    text = file.read_text(encoding="utf-8") + added if as_before else before
    file.write_text(_fewer(text) if quick else text, encoding="utf-8")
    return found[2]


def _type(session: Session, block: str, stale: list[str], quick: bool) -> str:
    """A block of `console`, with its outputs anew; what does not fit is added to `stale`."""
    parts = []
    for command, shown in commands(block):
        parts.append(f"$ {command}\n")
        left_out = rf"{session.never}|{session.slow}" if quick else session.never
        if command == PYTHON:
            script, end, shown = shown.partition("END\n")
            parts += [script, end]
            done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, check=False)
            code, output = done.returncode, done.stdout + done.stderr
        elif not command.startswith("forge ") or re.match(left_out, command):
            parts.append(shown)
            continue
        else:
            interrupt = f"\n{INTERRUPT}" in f"\n{shown}"
            code, output = _run(_fewer(command) if quick else command, interrupt=interrupt)
        if not shown.strip():
            stale += [f"`{command}` ends with exit code {code}:\n{output}"] if code else []
            parts.append(shown)
            continue
        try:
            parts.append(matched(shown.splitlines(), output.splitlines()))
        except StaleError as error:
            stale.append(f"`{command}` does not print {error}. It prints\n{output}")
    return "".join(parts)


def commands(block: str) -> list[tuple[str, str]]:
    """Each command of a block, without its comment, and the lines below it."""
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    return [(command, shown) for command, shown in found]


# -- commands ---------------------------------------------------------------------------------------------------------


def _fewer(text: str) -> str:
    for full, few in FEWER:
        text = text.replace(full, few)
    return text


class _Output(io.StringIO):
    """Keeps what is printed; presses Ctrl-C at the first line of a step, if it is to."""

    def __init__(self, *, interrupt: bool) -> None:
        super().__init__()
        self._interrupt = interrupt

    def write(self, text: str) -> int:
        count = super().write(text)
        if self._interrupt and re.search(r"^step \d", self.getvalue(), re.MULTILINE):
            self._interrupt = False
            signal.raise_signal(signal.SIGINT)
        return count


def _run(command: str, *, interrupt: bool) -> tuple[int, str]:
    """Run a `forge` command in this process; its exit code and all that it prints."""
    here = str(Path.cwd())
    for name in [name for name, module in sys.modules.items() if _home(module).startswith(here)]:
        del sys.modules[name]  # a file of the page may have changed since
    importlib.invalidate_caches()
    output = _Output(interrupt=interrupt)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run(shlex.split(command, comments=True)[1:])
    return code, output.getvalue().replace(here, ".")


def _home(module: object) -> str:
    return getattr(getattr(module, "__spec__", None), "origin", None) or ""


@contextlib.contextmanager
def _place(session: Session, *, quick: bool) -> Iterator[None]:
    """An empty folder to be in, and an environment that what is installed there is part of."""
    variables = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "110", "PYTHONDONTWRITEBYTECODE": "1"}
    variables |= {"FORGE_SET": session.few} if quick else {}
    log, progress = logging.getLogger("forge_train"), logging.getLogger("forge_train.progress")
    before = dict(os.environ), list(sys.path), sys.dont_write_bytecode, log.level, log.propagate, list(log.handlers)
    progress.handlers.clear()  # with any handler there, the command line would add none
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        site = Path.cwd() / "site"
        (site / "pip").mkdir(parents=True)
        (site / "pip" / "__init__.py").touch()
        (site / "pip" / "__main__.py").write_text((ROOT / "docs" / "install.py").read_text("utf-8"), "utf-8")
        found = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # has `forge`
        os.environ |= variables | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(site / "cache"), "PATH": found}
        sys.path.insert(0, str(site))
        sys.dont_write_bytecode = True
        session.before()
        try:
            yield
        finally:
            os.environ.clear()
            environment, sys.path[:], sys.dont_write_bytecode, log.level, log.propagate, log.handlers[:] = before
            os.environ |= environment
            progress.handlers.clear()
            progress.propagate = True


# -- what pages take for granted --------------------------------------------------------------------------------------


def _texts() -> None:
    """A text that does not change."""
    Path("texts").mkdir()
    Path("texts", "apache.txt").write_bytes((ROOT / "LICENSE").read_bytes())


def _mine() -> None:
    """The configuration of docs/how-to/first-run.md, with checkpoints, and a text for it."""
    _texts()
    text = (ROOT / "docs/how-to/first-run.md").read_text(encoding="utf-8").partition('title="mine.toml"\n')[2]
    mine = text.partition("```")[0] + "\n[checkpoint]\nevery = 30\n"
    Path("mine.toml").write_text(_fewer(mine) if "FORGE_SET" in os.environ else mine, encoding="utf-8")


def _larger() -> None:
    """A configuration whose heads can be split over eight ranks."""
    mine = 'preset = "quickstart"\n[train]\nglobal_batch = 64\n[decoder]\ndim = 256\nlayers = 2\nheads = 16\n'
    Path("mine.toml").write_text(mine, encoding="utf-8")


SESSIONS = {
    "tutorial.md": Session(
        before=_texts,
        folder="forge-train-norm-guard",
        few="text.path=texts;text.held_out=0.1;log.every=2;train.evaluate_batches=1",
    ),
    "how-to/first-run.md": Session(before=_texts),
    "how-to/inspect-data.md": Session(before=_texts),
    "how-to/pipelines.md": Session(slow=".* --schedules"),
    "how-to/plan.md": Session(before=_larger, slow=r".* (--device h100|-p ac|train.micro_batch=1)"),
    "how-to/resume.md": Session(before=_mine, never="forge train --resume"),
    "how-to/schedules.md": Session(before=_mine, never="forge train"),
    "how-to/verify.md": Session(before=_mine, slow="forge verify"),
}
"""Pages with transcripts."""

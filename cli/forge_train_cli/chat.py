"""`forge chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError, nearest
from forge_train_kit.format import format_plural
from forge_train_tools.messages import waiting

from . import screen
from .failures import complain
from .options import plugins_option, set_option
from .sampling import factors, sampling_options, values

if TYPE_CHECKING:
    from forge_train_tools.generation.chat import Chat

COMMANDS = {
    "/system TEXT": "say how the model is to answer, before the first message; without TEXT, no longer",
    "/reset": "forget the chat, but not the system's message",
    "/save FILE": "write the chat to a new file, as a record that can be trained on",
    "/help": "show these commands; //TEXT says a text that begins with /",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}


@click.command(short_help="Chat with a trained model.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--system", default="", metavar="TEXT", help="How the model is to answer.")
@sampling_options(tokens=1000)
@plugins_option
@set_option
def chat(
    path: Path,
    system: str,
    template: str,
    adapter: tuple[str, ...],
    plugins: tuple[str, ...],
    assignments: tuple[str, ...],
    **options: Any,
) -> int:
    """Chat with the model of PATH: a run (its newest whole checkpoint), a checkpoint, or a Hugging Face folder.

    Each line is a message, from the terminal or a pipe, and the model remembers those before. When they are more than
    it reads at once, it does without the oldest. /help lists the commands.

    \b
    forge chat runs/tuned
    forge chat Qwen3-0.6B --system "Answer in one word." --temperature 0.6 --top-p 0.95
    forge chat base-model --template chatml
    echo "Who are you?" | forge chat runs/tuned --temperature 0
    """
    with waiting(f"loading {path}"):
        from forge_train_tools import open_model
        from forge_train_tools.generation.defaults import tell_unused
        from forge_train_tools.generation.sampling import Sampling

        opened = open_model(path, plugins=plugins, set=values(assignments), adapters=factors(adapter))
        talk = Talk(opened.chat(system=system, template=template, **options))
        tell_unused(opened.path, Sampling(**options))
    if sys.stdin.isatty():
        click.secho(f"{opened.path}. /help lists the commands, Ctrl-D leaves.", dim=True, err=True)
    for line in _lines():
        if not talk.take(line):
            break
    return ConfigError.code if talk.failed and not sys.stdin.isatty() else 0


class Talk:
    """A chat on the screen."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._terminal = sys.stdout.isatty()
        self._left_out = 0
        self.failed = False
        """True once a message or a command was refused."""

    def take(self, line: str) -> bool:
        """Answer a message, or do a command; returns False if it was the last.

        Args:
            line: as it was typed, without its end.
        """
        try:
            if line.startswith("//"):
                self._answer(line[1:])
            elif line.startswith("/"):
                return self._command(*line.split(maxsplit=1))
            elif line.strip():
                self._answer(line)
        except ConfigError as error:
            complain(str(error))
            self.failed = True
        return True

    def _command(self, name: str, given: str = "") -> bool:
        given = given.strip()
        if given and name[1:] in self._chat.modalities:
            self._chat.show(name[1:], Path(given).expanduser())
            self._say("The next message begins with it.")
            return True
        if name not in (known := [one.split()[0] for one in self._commands]):
            hint = nearest(name, known)
            takes = ", and the model takes text alone" if given and not (hint or self._chat.modalities) else ""
            raise ConfigError(f"There is no {name}{takes}; /help lists the commands.{hint}")
        if given and name not in ("/system", "/save"):
            raise ConfigError(f"{name} takes nothing after it.")
        if name == "/system":
            self._chat.set_system(given)
            self._say("The answers follow it." if given else "There is no system's message any more.")
        elif name == "/reset":
            self._chat.reset()
            self._left_out = 0
            self._say("The chat is forgotten.")
        elif name == "/save":
            if not given:
                raise ConfigError("/save needs a file, as in /save chat.jsonl.")
            self._chat.save(Path(given).expanduser())
            self._say(f"Saved to {given}.")
        elif name == "/help":
            for one, does in self._commands.items():
                self._say(f"{one:<14}{does}")
        elif name[1:] in self._chat.modalities:
            raise ConfigError(f"{name} needs a file; the next message begins with it.")
        return name != "/quit"

    @property
    def _commands(self) -> dict[str, str]:
        """All commands, those that show items among them."""
        shown = {f"/{one} FILE": "begin the next message with this file" for one in self._chat.modalities}
        return {**shown, **COMMANDS}

    def _answer(self, text: str) -> None:
        try:
            with closing(self._chat.answer(text)) as pieces:
                for piece in pieces:
                    click.echo(screen.visible(piece) if self._terminal else piece, nl=False)
                    sys.stdout.flush()
            click.echo()
        except KeyboardInterrupt:
            click.echo()
            self._say("Stopped.")
        done = self._chat.completion
        if self._chat.left_out > self._left_out:
            turns = "oldest turn" if self._chat.left_out == 1 else f"{self._chat.left_out} oldest turns"
            self._say(f"The chat is longer than what the model reads at once: it answers without the {turns}.")
        if done is not None and done.stopped == "length":
            self._say("The answer ended because the model can read no further; /reset makes room.")
        elif done is not None and done.stopped == "tokens":
            self._say(f"The answer ended after {format_plural(done.tokens, 'token')}; --tokens allows more.")
        if done is not None and done.drafts and self._terminal:
            self._say(str(done.drafts))
        self._left_out = self._chat.left_out

    def _say(self, text: str) -> None:
        click.secho(f"({text})" if not text.startswith("/") else text, dim=True, err=True)


def _lines() -> Iterator[str]:
    """Lines of stdin, from a terminal with history and editing.

    Raises:
        ConfigError: a pipe that is not UTF-8.
    """
    if not sys.stdin.isatty():
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ConfigError(f"stdin is not UTF-8 in line {number}.") from error
        return
    with suppress(ImportError):  # where Python came without it
        import readline  # noqa: F401  # gives `input` history and editing
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.secho("\n(Ctrl-D leaves.)", dim=True, err=True)

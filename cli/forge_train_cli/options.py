"""Options that several commands share."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from forge_train.base.errors import ConfigError
from forge_train_tools.sources import PRESET, RUN_DIR

if TYPE_CHECKING:
    from forge_train_tools.configuration.request import Request

_F = TypeVar("_F", bound=Callable[..., Any])


def names_of(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Names given with commas, or by repeating the option."""
    names = [name.strip() for value in values for name in value.split(",")]
    if not all(names):
        raise click.BadParameter("expected names, separated by commas.", ctx, param)
    return tuple(dict.fromkeys(names))


_CONFIG = click.argument("config", required=False)
plugins_option = click.option(
    "--plugins", "-p", multiple=True, metavar="A,B", callback=names_of, help="Enable these plugins too."
)
_WITHOUT = click.option("--without", multiple=True, metavar="A,B", callback=names_of, help="Disable these plugins.")
set_option = click.option(
    "--set",
    "-s",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one value, like train.steps=200.",
)


_FROM = click.option(
    "--from",
    "source",
    default="",
    metavar="PATH",
    help="Start from the model, weights and tokenizer of a Hugging Face folder, a run or a checkpoint.",
)


_ADAPTER = click.option(
    "--adapter", default="", metavar="PEFT_DIR", help="Begin with an adapter of PEFT, on the model of CONFIG."
)


def plugin_options(function: _F) -> _F:
    """--plugins and --without, as `plugins` and `without`."""
    return plugins_option(_WITHOUT(function))


def run_options(default: str = PRESET) -> Callable[[_F], _F]:
    """CONFIG, --plugins, --without and --set; the command gets them as one `request`.

    Args:
        default: the configuration if none is named; if this is empty, the command chooses it, and imports it with
            `hugging_face`.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def command(
            *args: Any,
            config: str | None,
            plugins: tuple[str, ...],
            without: tuple[str, ...],
            assignments: tuple[str, ...],
            source: str,
            adapter: str,
            **options: Any,
        ) -> Any:
            from forge_train_tools.configuration.request import Request  # listings don't need it
            from forge_train_tools.sources import continuing

            request = Request(
                config=config or ("" if source else default),
                model_from=source,
                plugins=plugins,
                without=without,
                set=assignments,
                environment=os.environ.get("FORGE_SET", ""),
            )
            request = continuing(request, adapter, source or config or "") if adapter else request
            return function(*args, request=hugging_face(request, RUN_DIR) if default else request, **options)

        return _CONFIG(plugin_options(set_option(_FROM(_ADAPTER(command)))))  # type: ignore[return-value]  # click gives what it is given

    return decorate


def hugging_face(request: Request, run_dir: str) -> Request:
    """The request to run, in which a Hugging Face folder is imported."""
    from forge_train_tools import sources

    return sources.hugging_face(request, Path(run_dir), lambda text: click.echo(text, err=True))


OF_CHATS = ("rename", "roles", "each_turn", "split_special_tokens")
"""Values of `chat_options`."""


def chat_options(function: _F) -> _F:
    """Add the options for reading conversations, as in `sft`: `OF_CHATS`."""
    for option in (
        click.option("--split-special-tokens", is_flag=True,
                     help="With --chat: keep special tokens in messages and tools as text."),
        click.option("--each-turn", is_flag=True,
                     help="With --chat: each turn of the assistant is a document that ends with it."),
        click.option("--roles", multiple=True, metavar="OWN=ROLE",
                     help="With --chat: the records' name of a role, and the role, as in bot=assistant."),
        click.option("--rename", multiple=True, metavar="NAME=OWN",
                     help="With --chat: the name to read, and the records' own, as in prompt=question."),
    ):  # fmt: skip
        function = option(function)
    return function


def named_values(option: str, given: tuple[str, ...]) -> dict[str, str]:
    """`NAME=OTHER` as a table.

    Raises:
        ConfigError: one is something else, or a name is there twice.
    """
    found: dict[str, str] = {}
    for one in given:
        name, _, other = one.partition("=")
        if not name or not other:
            raise ConfigError(f"{option} {one}: expected two names with = between them, like prompt=question.")
        if name in found:
            raise ConfigError(f"{option} {one}: {name} is given twice.")
        found[name] = other
    return found


def items_options(function: _F) -> _F:
    """The options that show a model items beside text, for `items_of`."""
    for option in (
        click.option("--item", multiple=True, metavar="MODALITY=FILE",
                     help="The same for any modality that the model takes, as in video=clip.mp4."),
        click.option("--image", multiple=True, metavar="FILE",
                     help="An image for each text, at its <image> or before it; may be repeated."),
    ):  # fmt: skip
        function = option(function)
    return function


def items_of(image: tuple[str, ...], item: tuple[str, ...]) -> dict[str, list[str]]:
    """Files by modality.

    Raises:
        ConfigError: one has no modality.
    """
    found: dict[str, list[str]] = {}
    for one in (*(f"image={file}" for file in image), *item):
        name, _, file = one.partition("=")
        if not (name and file):
            raise ConfigError(f"--item {one}: expected MODALITY=FILE, as in video=clip.mp4.")
        found.setdefault(name, []).append(file)
    return found


def json_option(function: _F) -> _F:
    """--json, passed as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def run_dir_option(function: _F) -> _F:
    """--run-dir."""
    return click.option(
        "--run-dir", default=RUN_DIR, show_default=True, metavar="DIR", help="Where run folders are made."
    )(function)


def nproc_option() -> Callable[[_F], _F]:
    """--nproc."""
    return click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Local processes to start.")


AUTO = "auto"


class Processes(click.IntRange):
    """A number of processes, or `auto`."""

    name = "processes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == AUTO else super().convert(value, param, ctx)


def processes_option(function: _F) -> _F:
    """--nproc, with `auto` as the default."""
    return click.option(
        "--nproc",
        type=Processes(min=1),
        default=AUTO,
        show_default=True,
        metavar="N|auto",
        help="Local processes to start; auto starts one for each CUDA device.",
    )(function)


def stdin_text(option: str) -> str:
    """The text on stdin, unchanged.

    Raises:
        ConfigError: if it is not UTF-8, naming the option.
    """
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: stdin is not UTF-8 (byte {error.start}).") from error


def named(name: str) -> str:
    """The setting of a run's name.

    Raises:
        BadParameter: for a name that is none, or that a setting would change.
    """
    if not name or name != name.strip() or not name.isprintable():
        raise click.BadParameter(
            f"expected a name of printable characters, and no spaces at either end, found {name!r}.",
            param_hint="--name",
        )
    return f"run.name={name}"

"""Options of text generation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from forge_train.base.errors import ConfigError

_F = TypeVar("_F", bound=Callable[..., Any])


template_option = click.option(
    "--template",
    default="",
    metavar="NAME|FILE",
    help="Another chat template than the model's: chatml, llama3, plain or a file.",
)


def sampling_options(tokens: int) -> Callable[[_F], _F]:
    """Add the fields of `Sampling`, and --adapter and --template.

    Args:
        tokens: the default of --tokens.
    """

    def decorate(function: _F) -> _F:
        for option in _options(tokens):
            function = option(function)
        return function

    return decorate


def _options(tokens: int) -> list[Callable[[_F], _F]]:
    """The last comes first in the help."""
    return [
        click.option(
            "--drafts",
            default=0,
            metavar="N",
            help="Let the model's own modules draft N tokens at once; the answers are the same.",
        ),
        click.option(
            "--lookup",
            default=0,
            metavar="N",
            help="Guess up to N tokens at once where the text repeats itself; the answers are the same.",
        ),
        template_option,
        click.option(
            "--adapter",
            multiple=True,
            metavar="DIR[=WEIGHT]",
            help="Add an adapter of PEFT to the weights, times WEIGHT (1 by default); may be repeated.",
        ),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated."),
        click.option("--seed", default=0, show_default=True, metavar="S", help="The same seed gives the same text."),
        click.option(
            "--repetition-penalty",
            default=1.0,
            metavar="R",
            help="Make tokens that were there before less likely; 1 means none.",
        ),
        click.option(
            "--min-p",
            default=0.0,
            metavar="P",
            help="Choose among the tokens that are at least P times as likely as the likeliest.",
        ),
        click.option(
            "--top-p",
            default=1.0,
            metavar="P",
            help="Choose among the fewest likeliest tokens whose probabilities reach P.",
        ),
        click.option("--top-k", default=0, metavar="K", help="Choose among the K likeliest tokens; 0 means all."),
        click.option(
            "--temperature",
            default=0.8,
            show_default=True,
            metavar="T",
            help="Divides the logits; 0 takes the likeliest token.",
        ),
        click.option("--tokens", default=tokens, show_default=True, metavar="N", help="The most tokens to generate."),
    ]


def factors(adapters: tuple[str, ...]) -> dict[str, float]:
    """Folder → factor.

    Raises:
        ConfigError: for a factor that is none, and a folder given twice.
    """
    found: dict[str, float] = {}
    for one in adapters:
        folder, equals, factor = one.rpartition("=")
        if not equals or Path(one).is_dir():  # which may have the sign in its name
            folder, factor = one, "1"
        try:
            number = float(factor)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"--adapter {one}: {factor!r} is no finite number.")
        if folder in found:
            raise ConfigError(f"--adapter {folder}: given twice.")
        found[folder] = number
    return found


def values(assignments: tuple[str, ...]) -> dict[str, str]:
    """Key → value.

    Raises:
        ConfigError: for what is no assignment.
    """
    found = dict[str, str]()
    for one in assignments:
        key, equals, value = one.partition("=")
        if not equals:
            raise ConfigError(f"--set {one!r}: expected key=value, like train.init_from=runs/first.")
        found[key.strip()] = value.strip()
    return found

"""`forge config`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps
from forge_train.config.tree import DEFAULT
from forge_train.config.validate import plain
from forge_train_tools.configuration.request import Request

from . import screen
from .lazy import LazyGroup
from .options import json_option, run_options

if TYPE_CHECKING:
    from forge_train.config import Config
    from forge_train.registry.setup import Setup

COMMANDS = {
    "show": (".config:show", "Show every value of a run, and where it comes from."),
    "init": (".config:init", "Write a configuration with comments."),
    "import": (".config:import_", "Write another trainer's configuration as one of Forge's."),
}


@click.group(cls=LazyGroup, table=COMMANDS, short_help="Show or write a configuration.")
def config() -> None:
    """Show or write a configuration."""


@click.command(short_help="Show every value of a run, and where it comes from.")
@run_options()
@click.option("--plot", is_flag=True, help="Draw the schedule of learning rates instead.")
@click.option("--svg", metavar="FILE", callback=screen.picture, help="Write the drawing to a file.")
@json_option
def show(request: Request, plot: bool, svg: str | None, as_json: bool) -> None:
    """Resolve CONFIG as `forge train` would, and show every value and where it comes from."""
    from forge_train_tools.configuration.setup import resolve

    setup = resolve(request, data=False)
    if plot or svg:
        _plot(setup, plot, Path(svg) if svg else None)
        return
    resolved = setup.config
    rows = list(_values(resolved))
    if as_json:
        click.echo(dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, indent=1))
        return
    from rich.text import Text

    default = "default"
    screen.table(
        ("key", "value", "where it comes from"),
        [
            (key, Text(_words(value), style="" if origin == default else "bold"), Text(origin, style="dim"))
            for key, value, origin in rows
        ],
        indent=0,
    )


@click.command(short_help="Write a configuration with comments.")
@run_options()
@click.option("--output", "-o", metavar="FILE", help="File to write; an existing file is never overwritten.")
def init(request: Request, output: str | None) -> None:
    """Write CONFIG, with the requested plugins and values, as a TOML file with a comment for every key.

    \b
    forge config init -p lion -o my.toml
    forge train my.toml
    """
    from forge_train_tools.configuration.comments import commented
    from forge_train_tools.configuration.setup import resolve

    path = Path(output) if output else None
    if path and path.exists():
        raise ConfigError(f"{path}: exists already; choose another name, or remove it.")
    setup = resolve(request, data=False, measured=False)
    text = f"# forge train {path or 'THIS_FILE'}\n\n" + commented(setup.config, setup.hooks)
    if path is None:
        click.echo(text, nl=False)
        return
    screen.write(path, text)
    click.echo(f"Wrote {path}. Train with: forge train {path}")


@click.command("import", short_help="Write another trainer's configuration as one of Forge's.")
@click.argument("trainer", type=click.Choice(["axolotl"]))
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--output", "-o", metavar="FILE", help="File to write; an existing file is never overwritten.")
def import_(trainer: str, file: Path, output: str | None) -> None:
    """Write FILE, a YAML file of axolotl, as a TOML file. Its first lines say what was left out, and why.

    \b
    forge config import axolotl lora.yml -o lora.toml
    """
    from .axolotl import read, translate

    if output and Path(output).exists():
        raise ConfigError(f"{output}: exists already; choose another name, or remove it.")
    text = translate(read(file)).text(file, output or "THIS_FILE")
    if output is None:
        click.echo(text, nl=False)
        return
    screen.write(Path(output), text)
    click.echo(f"Wrote {output}. Its first lines say what was left out, and how to train with it.")


def _plot(setup: Setup, shown: bool, file: Path | None) -> None:
    """Show the schedule of learning rates on the screen, and write it to a file."""
    from forge_train_tools.offline.schedule import learning_rates

    from .plotting import as_svg, in_terminal

    title = f"Learning rate by {setup.hooks.provider('lr_schedule')}, as a share of its peak"
    rates = learning_rates(setup)
    if shown:
        click.echo("\n".join([title, *in_terminal(rates)]))
    if file:
        screen.write(file, as_svg(title, rates))
        click.echo(f"Wrote {file}.")


def _values(resolved: Config) -> Iterator[tuple[str, Any, str]]:
    """Key, JSON value and origin of every setting."""
    for name in ("plugins", "without"):
        yield name, list(getattr(resolved, name)), str(resolved.origin((name,)))
    for slot, plugin in sorted(resolved.defaults.items()):
        origins = [origin for key, origin in resolved.origins.items() if key[0] == "defaults" and key[-1] == slot]
        yield f"defaults.{slot}", plugin, str(origins[0] if origins else DEFAULT)
    for name, section in resolved.everything().items():
        for path, value in _leaves(section, plain(section), (name,)):
            counted = path == ("train", "steps") and resolved.train.epochs
            yield ".".join(path), value, "counted, by train.epochs" if counted else str(resolved.origin(path))


def _leaves(section: Any, values: Mapping[str, Any], prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        inner, path = getattr(section, name), (*prefix, name)
        if dataclasses.is_dataclass(inner):
            yield from _leaves(inner, value, path)
        else:
            yield path, value


def _words(value: Any) -> str:
    """A value as written in TOML."""
    return json.dumps(value, ensure_ascii=False) if value is not None else "–"

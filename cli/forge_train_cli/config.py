"""`forge config`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.config.layers import DEFAULT, Request
from forge_train.config.validate import plain
from forge_train.ground.errors import ConfigError
from forge_train.ground.strict_json import dumps

from . import screen
from .lazy import LazyGroup
from .options import json_option, run_options

if TYPE_CHECKING:
    from forge_train.config import Config

COMMANDS = {
    "show": (".config:show", "Every value of a run, and where it comes from."),
    "init": (".config:init", "Write a configuration with comments."),
}


@click.group(cls=LazyGroup, table=COMMANDS, short_help="Show or write a configuration.")
def config() -> None:
    """Show or write a configuration."""


@click.command(short_help="Every value of a run, and where it comes from.")
@run_options()
@json_option
def show(request: Request, as_json: bool) -> None:
    """Resolve CONFIG as `forge train` would, and show every value with where it comes from."""
    from forge_train.registry.setup import resolve

    resolved = resolve(request, data=False).config
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
@click.option("--output", "-o", metavar="FILE", help="Write it there; a file that exists is left alone.")
def init(request: Request, output: str | None) -> None:
    """Write CONFIG, with the plugins and values that were asked for, as a TOML file with a comment for every key.

    \b
    forge config init -p lion -o my.toml
    forge train my.toml
    """
    from forge_train.registry.setup import resolve
    from forge_train.registry.write import to_toml

    path = Path(output) if output else None
    if path and path.exists():
        raise ConfigError(f"{path}: exists already; choose another name, or remove it.")
    setup = resolve(request, data=False)
    text = f"# forge train {path or 'THIS_FILE'}\n\n" + to_toml(setup.config, setup.hooks, comments=True)
    if path is None:
        click.echo(text, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't write it: {error.strerror or error}.") from error
    click.echo(f"Wrote {path}. Train with: forge train {path}")


def _values(resolved: Config) -> Iterator[tuple[str, Any, str]]:
    """Key, JSON value and origin of everything."""
    for name in ("plugins", "without"):
        yield name, list(getattr(resolved, name)), str(resolved.origin((name,)))
    for slot, plugin in sorted(resolved.defaults.items()):
        origins = [origin for key, origin in resolved.origins.items() if key[0] == "defaults" and key[-1] == slot]
        yield f"defaults.{slot}", plugin, str(origins[0] if origins else DEFAULT)
    for name, section in resolved.everything().items():
        for path, value in _leaves(section, plain(section), (name,)):
            yield ".".join(path), value, str(resolved.origin(path))


def _leaves(section: Any, values: Mapping[str, Any], prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        inner, path = getattr(section, name), (*prefix, name)
        if dataclasses.is_dataclass(inner):
            yield from _leaves(inner, value, path)
        else:
            yield path, value


def _words(value: Any) -> str:
    """A value as one would write it in TOML."""
    return json.dumps(value, ensure_ascii=False) if value is not None else "–"

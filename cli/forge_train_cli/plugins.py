"""`forge plugins`."""

from __future__ import annotations

import json
import sys
import textwrap

import click

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps
from forge_train.registry.discovery import DISTRIBUTION, discover
from forge_train_kit.source import Source

from . import screen
from .lazy import LazyGroup
from .options import json_option
from .roles import ROLES, defaults, role

COMMANDS = {
    "list": (".plugins:list_plugins", "List installed plugins, without importing them."),
    "info": (".plugins:info", "Describe a plugin, its hooks and its options."),
    "hooks": (".hooks:hooks", "List hooks: who declares, calls and implements each."),
    "search": (".directory:search", "Search the directory of plugins, and those installed."),
    "check": (".check:check", "Try plugins against the contract."),
    "new": (".new:new", "Write a new plugin, ready to be installed."),
    "install": (".plugins:install", "Install plugins with pip, in this environment."),
}


@click.group(cls=LazyGroup, table=COMMANDS, short_help="List, describe, check, write and install plugins.")
def plugins() -> None:
    """List, describe, check, write and install plugins.

    An installed plugin does nothing until a configuration or --plugins names it.
    """


@click.command("list", short_help="List installed plugins, without importing them.")
@json_option
def list_plugins(as_json: bool) -> None:
    """List every plugin that could be enabled, by role. None is imported."""
    found, brought = discover(), defaults()
    if as_json:
        keys = ("name", "distribution", "version", "object")
        plain = [{**{key: getattr(one, key) for key in keys}, "summary": Source(one).summary} for one in found]
        more = [{"role": role(one), "default": brought.get(one.name, [])} for one in found]
        click.echo(dumps([{**one, **added} for one, added in zip(plain, more, strict=True)], indent=1))
        return
    wide = max((len(one.name) for one in found), default=0)
    roles = {one: role(one) for one in found}
    grouped = {name: [one for one in found if roles[one] == name] for name in ROLES}
    for name, ones in grouped.items():
        if ones:
            screen.heading(name.capitalize())
        rows = []
        for one in sorted(ones, key=lambda one: (one.distribution != DISTRIBUTION, one.name)):
            mark = "*" if one.name in brought else " "
            owner = "" if one.distribution == DISTRIBUTION else f"  ({one.distribution} {one.version})"
            rows.append((f"{mark} {one.name}", Source(one).summary + owner))
        screen.listing(rows, wide + 2)
    notes = (
        "* a default: it is enabled where its slot is needed and no other plugin fills it.",
        "forge plugins info NAME says more; forge train --plugins NAME enables one; forge plugins install adds others.",
    )
    click.echo()
    for note in notes:
        click.echo(click.style("\n".join(textwrap.wrap(note, screen.width())), dim=True))


@click.command(short_help="Describe a plugin, its hooks and its options.")
@click.argument("name")
@json_option
def info(name: str, as_json: bool) -> None:
    """Describe a plugin: where it comes from, its hooks, its options with their ranges and defaults.

    NAME is a plugin's name, a dotted package.module:Class or a file. It is imported.
    """
    from .describe import describe, show

    description = describe(name)
    if as_json:
        click.echo(dumps(description, indent=1))
    else:
        show(description)


@click.command(
    short_help="Install plugins with pip, in this environment.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("specs", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SPEC...")
def install(specs: tuple[str, ...]) -> int:
    """Run `pip install SPEC...` in the environment that forge runs in; pip's own options are passed on."""
    import importlib.util
    import subprocess

    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{sys.executable} has no pip. Install it with `{sys.executable} -m ensurepip`, or use the installer "
            "that made this environment (`uv pip install …`)."
        )
    before = {one.name for one in discover()}
    code = subprocess.run([sys.executable, "-m", "pip", "install", *specs], check=False).returncode
    if code:
        return 1
    listing = subprocess.run(
        [sys.executable, "-m", "forge_train_cli", "plugins", "list", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    new = [one for one in json.loads(listing.stdout) if one["name"] not in before]
    for one in new:
        click.echo(f"{click.style(one['name'], bold=True)}  {one['summary']}")
    if new:
        click.echo(f"Enable with: forge train --plugins {','.join(one['name'] for one in new)}")
    return 0

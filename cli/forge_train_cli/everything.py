"""`forge describe`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps

from . import screen
from .options import json_option, plugins_option


@click.command(short_help="Describe commands, hooks, plugins and configurations as JSON.")
@click.option("--schema", "only_schema", is_flag=True, help="Only the JSON Schema of configurations, for editors.")
@plugins_option
@click.option("--out", metavar="FILE", help="Write to a file, which is replaced.")
@json_option
@click.pass_context
def describe(
    context: click.Context, only_schema: bool, plugins: tuple[str, ...], out: str | None, as_json: bool
) -> None:
    """Describe, for coding agents and editors, what this installation can do.

    With --json: every command with its options, every hook, every plugin with its options, and the JSON Schema of
    configurations. All installed plugins are imported; --plugins adds others, such as ./mine.py.

    \b
    forge describe --json
    forge describe --schema --out forge.schema.json
    """
    from forge_train_kit.plugins import find
    from forge_train_tools.configuration.json_schema import schema

    if as_json == only_schema:
        raise ConfigError("Say one of --json, for everything, and --schema, for the JSON Schema of configurations.")
    found, problems = schema([find(name) for name in plugins])
    for problem in problems:
        click.echo(problem, err=True)
    text = dumps(found if only_schema else _everything(context.find_root(), plugins, found), indent=1)
    if out is None:
        click.echo(text)
        return
    screen.write(Path(out), f"{text}\n")
    click.echo(f"Wrote {out}.", err=True)


def _everything(root: click.Context, plugins: tuple[str, ...], schema: dict[str, Any]) -> dict[str, Any]:
    from forge_train import __version__
    from forge_train.plugin.plugin import API
    from forge_train.registry.discovery import discover

    from .hooks import plain_hooks

    installed = [one.name for one in discover()]
    return {
        "version": __version__,
        "api": list(API),
        "commands": list(_commands(root)),
        "hooks": plain_hooks(),
        "plugins": [_plugin(name) for name in dict.fromkeys((*installed, *plugins))],
        "schema": schema,
    }


def _plugin(name: str) -> dict[str, Any]:
    from .describe import describe

    try:
        return describe(name)
    except ConfigError as error:
        return {"name": name, "error": str(error)}


def _commands(context: click.Context) -> Iterator[dict[str, Any]]:
    """Every command below a group. One of another distribution is named, not imported."""
    from .lazy import LazyGroup

    group = context.command
    if not isinstance(group, click.Group):
        yield _command(context)
        return
    table = group.table if isinstance(group, LazyGroup) else group.commands
    for name in table:
        if command := group.get_command(context, name):
            yield from _commands(click.Context(command, info_name=name, parent=context))
    for name, owners in sorted(group.outsiders().items() if isinstance(group, LazyGroup) else ()):
        for one in owners if name not in table else ():
            yield {"name": f"{context.command_path} {name}", "from": one.owner}


def _command(context: click.Context) -> dict[str, Any]:
    command = context.command
    given = [one.to_info_dict() for one in command.params]
    return {
        "name": context.command_path,
        "summary": command.get_short_help_str(200),
        "help": inspect.cleandoc(command.help or "").replace("\b\n", ""),
        "usage": command.get_usage(context).removeprefix("Usage: "),
        "arguments": [_parameter(one) for one in given if one["param_type_name"] == "argument"],
        "options": [_parameter(one) for one in given if one["param_type_name"] == "option" and not one["hidden"]],
    }


def _parameter(info: dict[str, Any]) -> dict[str, Any]:
    kind = info["type"]
    bounds = {key: kind[key] for key in ("choices", "min", "max") if kind.get(key) is not None}
    shared = {
        "type": "flag" if info.get("is_flag") else kind["name"],
        **bounds,
        "required": info["required"],
        "several": info["multiple"] or info["nargs"] != 1,
        "default": info["default"],
    }
    if info["param_type_name"] == "argument":
        return {"name": info["name"], **shared}
    return {"names": info["opts"] + info["secondary_opts"], **shared, "help": info["help"] or ""}

"""A click group that lists its commands without importing them, and imports a command when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from forge_train.base.errors import ConfigError, describe, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "forge_train.commands"


@dataclass(frozen=True)
class Outside:
    """A command of another distribution, not yet imported."""

    point: EntryPoint

    @property
    def owner(self) -> str:
        from forge_train.registry.discovery import identity

        return " ".join(identity(self.point.dist)).strip()

    def load(self) -> click.Command:
        """Import the command.

        Raises:
            ConfigError: if that fails or gives something else.
        """
        try:
            command = self.point.load()
        except Exception as error:  # a module may raise anything when it is imported
            raise ConfigError(
                f"The command {self.point.name!r} of {self.owner} failed to import: {describe(error)}"
            ) from error
        if not isinstance(command, click.Command):
            raise ConfigError(
                f"The command {self.point.name!r} of {self.owner}: {self.point.value} is not a click command."
            )
        return command


class LazyGroup(click.Group):
    """Built-in commands from a table and, if `outside` is set, those of other distributions from entry points.

    Args:
        table: name → `module:attribute` and summary. The module is in this package if it begins with a dot.
        outside: whether to add entry points of the group `forge_train.commands`.
    """

    def __init__(
        self, *args: object, table: Mapping[str, tuple[str, str]], outside: bool = False, **more: object
    ) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]  # click's own arguments, passed on
        self.table, self.outside = table, outside

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.table, *sorted(self.outsiders().keys() - self.table.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.table:
            module, _, attribute = self.table[cmd_name][0].partition(":")
            command: click.Command = getattr(importlib.import_module(module, __package__), attribute)
            return command
        outsiders = self.outsiders().get(cmd_name, [])
        if len(outsiders) > 1:
            owners = " and ".join(sorted(one.owner for one in outsiders))
            raise ConfigError(f"{owners} each provide the command {cmd_name!r}; uninstall all but one.")
        return outsiders[0].load() if outsiders else None

    def outsiders(self) -> dict[str, list[Outside]]:
        """Commands of other distributions by name; none is imported."""
        found: dict[str, list[Outside]] = {}
        if self.outside:
            from importlib.metadata import entry_points

            for point in entry_points(group=GROUP):
                found.setdefault(point.name, []).append(Outside(point))
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        known = name in self.table or name.startswith("-")  # otherwise every distribution is searched for commands
        if not known and name not in (names := self.list_commands(ctx)):
            hint = nearest(name, names) or f" There are {', '.join(names)}."
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """click's own method asks every command for its help, which would import them all."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.table.items()])
        rows = [
            (name, f"from {one.owner}" + (" (hidden by forge's own)" if name in self.table else ""))
            for name, ones in sorted(self.outsiders().items())
            for one in ones
        ]
        if rows:
            with formatter.section("Commands of plugins"):
                formatter.write_dl(rows)

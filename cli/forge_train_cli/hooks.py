"""`forge plugins hooks`."""

from __future__ import annotations

from typing import Any

import click

from forge_train.base.strict_json import dumps

from . import screen
from .options import json_option


@click.command(short_help="List hooks: who declares, calls and implements each.")
@json_option
def hooks(as_json: bool) -> None:
    """List every hook that a plugin could implement: its kind, and who declares, calls and implements it.

    Everything is read from metadata and source; nothing is imported. A package declares hooks of its own under the
    entry point group forge_train.hookspecs.
    """
    from forge_train_tools.hook_table import hooks as table

    if as_json:
        click.echo(dumps(plain_hooks(), indent=1))
        return
    found = table()
    wide = max(len(one.spec.name) for one in found)
    for module in dict.fromkeys(one.module for one in found):
        click.echo(click.style(f"{module.module} ({module.label})", dim=True))
        lines = []
        for one in (one for one in found if one.module == module):
            who = f"called by {', '.join(one.callers) or 'nobody'}; implemented by {', '.join(one.plugins) or 'nobody'}"
            lines.append((one.spec.name, f"{one.spec.kind}; {who}"))
        screen.listing(lines, wide)


def plain_hooks() -> list[dict[str, Any]]:
    """Every hook, as JSON."""
    from forge_train_tools.hook_table import hooks as table

    return [
        {
            "hook": one.spec.name,
            "kind": one.spec.kind,
            "optional": one.spec.optional,
            "summary": one.spec.summary,
            "declared_by": {
                "distribution": one.module.distribution,
                "version": one.module.version,
                "module": one.module.module,
            },
            "called_by": list(one.callers),
            "implemented_by": list(one.plugins),
        }
        for one in table()
    ]

"""`forge votes`."""

import click

from forge_committee.facts import RULE
from forge_train.registry.discovery import discover


@click.command()
def votes() -> None:
    """List the plugins that can count a committee's votes, without importing them."""
    for found in discover():
        if rule := RULE.read(found):
            click.echo(f"{found.name:<16} {rule}")

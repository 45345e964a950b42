"""A command: the entry point `forge_train.commands`. Imported when it is called, and for no other reason."""

from __future__ import annotations

from pathlib import Path

import click

from forge_train import ConfigError
from forge_train.run.records import read

BARS = "▁▂▃▄▅▆▇█"


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--metric", default="loss", show_default=True, help="The key of metrics.jsonl to draw.")
def sparkline(run: Path, metric: str) -> None:
    """Draw a metric of RUN in one line."""
    values = [line[metric] for line in read(run / "metrics.jsonl") if isinstance(line.get(metric), (int, float))]
    if not values:
        raise ConfigError(f"{run}: no step has logged a {metric!r}.")
    low, high = min(values), max(values)
    bars = "".join(BARS[round((value - low) / (high - low or 1) * (len(BARS) - 1))] for value in values)
    click.echo(f"{metric} {values[0]:.4g} {bars} {values[-1]:.4g}")

"""`forge checkpoint prune`, `copy`, `move` and `diff`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_bytes
from forge_train.base.strict_json import dumps
from forge_train.run.run import is_run

from . import screen
from .addresses import FETCHED, PLACE
from .options import json_option

if TYPE_CHECKING:
    from forge_train_tools.offline.differences import Differences, TensorDifference

PATH = click.Path(path_type=Path)
SHOWN = 20
"""Rows of a table on the screen."""


@click.command(short_help="Remove checkpoints that a run does not keep.")
@click.argument("run", type=PLACE)
@click.option("--keep", type=click.IntRange(min=1), help="How many of the newest to keep, instead of checkpoint.keep.")
@click.option("--keep-every", type=click.IntRange(min=0), help="Also keep multiples of this step; 0 keeps none.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@json_option
def prune(run: Path | str, keep: int | None, keep_every: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove the checkpoints that RUN's configuration would not keep; the newest whole ones always stay.

    \b
    forge checkpoint prune runs/first --dry-run
    forge checkpoint prune runs/first --keep 1 --keep-every 1000
    """
    from forge_train_tools.offline import retention

    if isinstance(run, str):
        gone = retention.prune_there(run, keep=keep, keep_every=keep_every, dry_run=dry_run)
    else:
        if not is_run(run):
            raise ConfigError(f"{run} is not a run.")
        wanted = retention.retention_of(run, keep=keep, keep_every=keep_every)
        found = retention.unwanted(run, wanted) if dry_run else retention.remove(run, wanted)
        gone = [(str(one.path), one.step, one.bytes) for one in found]
    if as_json:
        rows = [dict(zip(("path", "step", "bytes"), one, strict=True)) for one in gone]
        click.echo(dumps({"dry_run": dry_run, "removed": rows}, indent=1))
        return
    for path, _, size in gone:
        click.echo(f"{path} ({format_bytes(size)}) {'would be' if dry_run else 'is'} removed")
    if not gone:
        click.echo(f"{run}: there is nothing to remove.")


@click.command(short_help="Move a checkpoint, even to another file system.")
@click.argument("path", type=PATH)
@click.argument("new", type=PATH)
@json_option
def move(path: Path, new: Path, as_json: bool) -> None:
    """Move the checkpoint PATH to NEW, which must not exist yet.

    It is verified first. If NEW is on another file system, PATH is copied, the copy is verified, and only then is PATH
    removed. The newest checkpoint of a run that is training can't be moved.
    """
    from forge_train_tools.offline.relocate import move as relocate

    relocate(path, new)
    click.echo(dumps({"path": str(new)}) if as_json else f"{new}: whole")


@click.command(short_help="Copy a checkpoint, even to or from an address.")
@click.argument("path", type=PLACE)
@click.argument("new", type=PLACE)
@json_option
def copy(path: Path | str, new: Path | str, as_json: bool) -> None:
    """Copy the checkpoint PATH to NEW, which must not exist yet. Either may be an address, like s3://bucket/best.

    The copy appears complete or not at all. A copy on this machine is verified.
    """
    from forge_train_tools.offline.relocate import copy as copy_to

    copy_to(str(path), str(new))
    click.echo(dumps({"path": str(new)}) if as_json else f"{new}: whole")


@click.command(short_help="Show which tensors of two checkpoints differ, and by how much.")
@click.argument("first", type=FETCHED)
@click.argument("second", type=FETCHED)
@click.option("--weights", is_flag=True, help="Compare the model alone, without optimizer and other state.")
@json_option
def diff(first: Path, second: Path, weights: bool, as_json: bool) -> int:
    """Compare two checkpoints tensor by tensor, one at a time; a run means its newest whole checkpoint.

    The exit code is 1 if they differ.
    """
    from forge_train_kit.foreign import resolve
    from forge_train_tools.offline.differences import compare

    paths = resolve(first), resolve(second)
    found = compare(*paths, prefix="model." if weights else "")
    same = not (found.tensors or found.state)
    if as_json:
        paths_json = {"first": str(paths[0]), "second": str(paths[1])}
        click.echo(dumps({**paths_json, "same": same, **asdict(found)}, indent=1))
    else:
        _show(found)
    return 0 if same else 1


def _show(found: Differences) -> None:
    if found.state:
        rows = [(one.key, _value(one.first), _value(one.second)) for one in found.state]
        screen.table(("state", "first", "second"), rows[:SHOWN])
        _more(len(rows))
        click.echo()
    if found.tensors:
        ordered = sorted(found.tensors, key=lambda one: -1.0 if one.relative is None else one.relative, reverse=True)
        head = ("tensor", "", "largest difference", "relative", "values")
        screen.table(head, [_row(one) for one in ordered[:SHOWN]], right=(2, 3, 4))
        _more(len(ordered))
        click.echo()
    click.echo(f"{found.equal:,} tensors are equal to the bit, {len(found.tensors):,} differ.")


def _row(one: TensorDifference) -> tuple[str, str, str, str, str]:
    name = one.name.removeprefix("model.")
    if one.kind == "shape":
        return name, " and ".join(str(list(shape or ())) for shape in one.shapes), "", "", ""
    if one.kind != "values":
        return name, one.kind, "", "", ""
    dtypes = "" if one.dtypes[0] == one.dtypes[1] else f"{one.dtypes[0]} and {one.dtypes[1]}"
    return name, dtypes, f"{one.max_abs:.3g}", f"{one.relative:.3g}", f"{one.values:,}"


def _value(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _more(rows: int) -> None:
    if rows > SHOWN:
        click.echo(f"… {rows - SHOWN:,} more; --json has all")

"""`forge checkpoint`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError
from forge_train.base.format import format_bytes
from forge_train.base.strict_json import dumps
from forge_train.run.run import is_run

from . import screen
from .addresses import FETCHED, PLACE
from .exchanging import convert, export, import_
from .keeping import copy, diff, move, prune
from .options import json_option

if TYPE_CHECKING:
    from forge_train_tools.offline.examine import Examined

PATH = click.Path(path_type=Path)


@click.group()
def checkpoint() -> None:
    """Look at checkpoints; exchange weights with Hugging Face.

    PATH is a checkpoint, or a run, which means its newest whole checkpoint; or the address of either, like
    s3://b/runs/first.
    """


for command in (convert, copy, diff, export, import_, move, prune):
    checkpoint.add_command(command)


@checkpoint.command("list", short_help="List the checkpoints of a run.")
@click.argument("run", type=PLACE)
@json_option
def list_checkpoints(run: Path | str, as_json: bool) -> None:
    """List the checkpoints of a run, and whether they are whole. Only sizes are compared; `verify` reads every file."""
    rows = _rows_there(run) if isinstance(run, str) else _rows_here(run)
    if as_json:
        click.echo(dumps(rows, indent=1))
    elif not rows:
        click.echo(f"{run} has no checkpoint yet.")
    else:
        screen.table(
            ("checkpoint", "step", "size", ""),
            [
                (
                    row["name"],
                    f"{row['step']:,}",
                    format_bytes(row["bytes"]),
                    row["problem"] or "latest" * row["latest"],
                )
                for row in rows
            ],
            right=(1, 2),
        )


def _rows_here(run: Path) -> list[dict[str, Any]]:
    from forge_train.checkpoint import checkpoint as store
    from forge_train.checkpoint import seal

    if not is_run(run):
        raise ConfigError(f"{run} is not a run.")
    newest = _latest(run)
    return [
        {
            "name": saved.path.name,
            "path": str(saved.path),
            "step": saved.step,
            "bytes": saved.bytes,
            "problem": seal.check(saved.path),
            "latest": saved.path.name == newest,
        }
        for saved in store.found(run / "checkpoints")
    ]


def _rows_there(address: str) -> list[dict[str, Any]]:
    from forge_train_kit.stores.fetching import locate

    place = locate(address)
    checked = [(stored, place.store.check(stored)) for stored in place.all()]
    newest = next((stored.name for stored, problem in checked if not problem), None)
    return [
        {
            "name": stored.name,
            "path": place.store.at(stored.name),
            "step": stored.step,
            "bytes": stored.bytes,
            "problem": problem,
            "latest": stored.name == newest,
        }
        for stored, problem in checked
    ]


@checkpoint.command(short_help="Show what a checkpoint holds.")
@click.argument("path", type=FETCHED)
@json_option
def inspect(path: Path, as_json: bool) -> None:
    """Show what a checkpoint holds: its progress, plugins and tensors. --json includes the configuration."""
    from forge_train.checkpoint import checkpoint as store
    from forge_train_kit.foreign import resolve

    path = resolve(path)
    state = store.read_state(path)
    tensors: list[dict[str, Any]] = [
        {
            "name": name,
            "shape": list(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "bytes": dtype.itemsize * _elements(shape),
        }
        for name, (shape, dtype) in sorted(store.shapes(path).items())
    ]
    if as_json:
        held = {
            "path": str(path),
            **state["progress"],
            "plugins": state["enabled"],
            "config": state["config"],
            "tensors": tensors,
        }
        click.echo(dumps(held, indent=1))
        return
    weights = [tensor for tensor in tensors if tensor["name"].startswith("model.")]
    rest = [tensor for tensor in tensors if not tensor["name"].startswith("model.")]
    click.echo(f"{path}: step {state['progress']['step']:,}, {state['progress']['tokens']:,} tokens")
    click.echo("plugins: " + ", ".join(f"{entry['name']} {entry['version']}" for entry in state["enabled"]) + "\n")
    screen.table(
        ("tensor", "shape", "dtype", "size"),
        [
            (
                tensor["name"].removeprefix("model."),
                " × ".join(map(str, tensor["shape"])) or "1",
                tensor["dtype"],
                format_bytes(tensor["bytes"]),
            )
            for tensor in weights
        ],
        right=(3,),
    )
    for title, those in (("weights", weights), ("optimizer and other state", rest)):
        elements = sum(_elements(tensor["shape"]) for tensor in those)
        size = format_bytes(sum(tensor["bytes"] for tensor in those))
        click.echo(f"\n{title}: {elements:,} values in {len(those)} tensors, {size}", nl=False)
    click.echo()


@checkpoint.command(short_help="Read every file, and compare it with what was saved.")
@click.argument("path", type=PLACE)
@json_option
def verify(path: Path | str, as_json: bool) -> int:
    """Read every file of a checkpoint, or of all checkpoints of a run, and compare sizes and hashes.

    Then check that its state, its index and its tensors are valid. Checkpoints at an address are
    fetched to a temporary folder, one after the other. The exit code is 1 if one is damaged.
    """
    examined = _examined_there(path) if isinstance(path, str) else _examined_here(path)
    if not examined:
        raise ConfigError(f"{path}: this run has no checkpoint yet.")
    if as_json:
        rows = [{"path": at, "problem": one.problem, "edited": list(one.edited)} for at, one in examined]
        click.echo(dumps(rows, indent=1))
    else:
        for at, one in examined:
            edited = f" ({', '.join(one.edited)} was edited since it was saved, as it may be)" if one.edited else ""
            click.echo(f"{at}: {click.style(one.problem, fg='red') if one.problem else 'whole'}{edited}")
    return 1 if any(one.problem for _, one in examined) else 0


def _examined_here(path: Path) -> list[tuple[str, Examined]]:
    from forge_train.checkpoint import checkpoint as store
    from forge_train.store.manifest import MANIFEST
    from forge_train_kit.foreign import resolve
    from forge_train_tools.offline.examine import examine

    if is_run(path):
        paths = [saved.path for saved in store.found(path / "checkpoints")]
    elif (path / MANIFEST).is_file() or (path / "state.json").is_file():
        paths = [path]
    else:
        paths = [resolve(path)]
    return [(str(one), examine(one)) for one in paths]


def _examined_there(address: str) -> list[tuple[str, Examined]]:
    from forge_train_kit.stores.fetching import locate
    from forge_train_tools.offline.examine import Examined, examine

    place, examined = locate(address), []
    for stored in place.all():
        with tempfile.TemporaryDirectory(prefix="forge-") as folder:
            if not (problem := place.store.check(stored)):
                path = Path(folder) / stored.name
                path.mkdir()
                place.store.copy_into(path, stored)
            found = Examined(Path(folder), problem) if problem else examine(path)
        examined.append((place.store.at(stored.name), found))
    return examined


def _latest(run: Path) -> str:
    file = run / "checkpoints" / "latest"
    if not file.is_file():
        return ""
    with file.open(encoding="utf-8", errors="replace") as text:
        return text.read(200).strip()


def _elements(shape: Any) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements

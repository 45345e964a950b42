"""`forge debug look`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError
from forge_train.base.strict_json import dumps
from forge_train_tools.messages import waiting

from . import screen
from .options import (
    items_of,
    items_options,
    json_option,
    names_of,
    nproc_option,
    plugins_option,
    set_option,
    stdin_text,
)

if TYPE_CHECKING:
    from forge_train_tools.looking.found import Looked

PAGE, NUMBERS = ".html", ".safetensors"


@click.command(short_help="Show what passes through a model while it reads a text.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--text", required=True, metavar="TEXT", help="The text to read; - reads it from stdin, unchanged.")
@items_options
@click.option(
    "--out",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A page (.html), or the numbers (.safetensors); may be repeated.",
)
@click.option(
    "--heads",
    multiple=True,
    metavar="L.H,…",
    callback=names_of,
    help="Attention maps to show: layer and head, or L.* for all heads of a layer; by default a few.",
)
@plugins_option
@set_option
@nproc_option()
@json_option
def look(
    path: Path,
    text: str,
    files: tuple[Path, ...],
    heads: tuple[str, ...],
    plugins: tuple[str, ...],
    assignments: tuple[str, ...],
    nproc: int | None,
    as_json: bool,
    **items: Any,
) -> None:
    """Show what passes through the model of PATH, a run, a checkpoint or a Hugging Face folder, while it reads a text:
    norms of the residual stream after each layer, attention maps of chosen heads, and the logit lens, which applies the
    head to each layer's state.

    \b
    forge debug look runs/first --text "def add(a, b):" --out look.html
    forge debug look Qwen3-0.6B --text "The capital of France is" --heads 0.0,27.* --out look.html
    forge debug look runs/first --text "def add(a, b):" --out look.safetensors --json
    forge debug look runs/first --text "def add(a, b):" --out without.html -p steer -s 'steer.zero_heads=["0.1"]'
    forge debug look runs/seeing --image cat.png --text "A picture of a cat" --out look.html
    forge debug look runs/big --text "def add(a, b):" --out look.html --nproc 4 -p tp -s parallel.tp=2
    """
    from forge_train_tools.looking.look import Looking
    from forge_train_tools.looking.look import look as run

    from .look_page import page

    _check(files, as_json=as_json)
    asked = Looking(
        path=path,
        text=stdin_text("--text -") if text == "-" else text,
        items=items_of(**items),
        heads=heads,
        plugins=plugins,
        set=assignments,
    )
    with waiting(f"reading with {path}"):
        found = run(asked, nproc=nproc or 1)
    for file in files:
        if file.suffix == PAGE:
            screen.write(file, page(found))
        else:
            _write_numbers(file, found)
    if as_json:
        click.echo(dumps(found.plain()))
        return
    screen.line(f"{found.checkpoint}, step {found.step}", "bold")
    for file in files:
        screen.line(f"  {file}: {len(found.ids):,} tokens, {len(found.states) - 1} layers")
    for reason in dict.fromkeys([*found.without.values(), *filter(None, [found.no_lens])]):
        screen.line(f"  {reason}.", "yellow")


def _check(files: tuple[Path, ...], *, as_json: bool) -> None:
    """Check the files before anything is computed.

    Raises:
        ConfigError: for no file, another ending, no folder, or a file that is somebody else's.
    """
    if not (files or as_json):
        raise ConfigError("--out: name a file to write, such as look.html, or ask for --json.")
    for file in files:
        if file.suffix not in (PAGE, NUMBERS):
            raise ConfigError(f"--out {file}: expected a file that ends with {PAGE} or {NUMBERS}.")
        if not file.parent.is_dir():
            raise ConfigError(f"--out {file}: there is no folder {file.parent}; make it first.")
        if file.suffix == PAGE:
            screen.check_own(file, lambda begins: screen.GENERATOR.encode() in begins, "a page written by forge")
        elif file.exists():
            raise ConfigError(f"--out {file}: exists; choose another name, or remove it.")


def _write_numbers(file: Path, found: Looked) -> None:
    from safetensors.torch import save

    about = {"checkpoint": found.checkpoint, "states": dumps(found.states), "texts": dumps(found.texts)}
    screen.write(file, save({name: one.contiguous() for name, one in found.tensors().items()}, about))

"""`forge runs pack`."""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import click

from forge_train.base.format import format_bytes
from forge_train.base.strict_json import dumps
from forge_train_tools.messages import show_progress
from forge_train_tools.run_folder import RunFolder, open_run

from .options import json_option, run_dir_option


@click.command(short_help="Write a run as one file that repeats it.")
@click.argument("run", required=False)
@click.option("--out", "--output", "-o", "output", metavar="FILE.zip|FOLDER",
              help="A new zip, or a new folder; by default RUN.zip.")  # fmt: skip
@click.option("--checkpoint", is_flag=False, flag_value="newest", default="", metavar="[STEP]",
              help="Include the weights of a checkpoint: of the newest whole one, or of that step.")  # fmt: skip
@run_dir_option
@json_option
def pack(run: str | None, output: str | None, checkpoint: str, run_dir: str, as_json: bool) -> None:
    """Write RUN (a path, or a name in the folder of runs; the newest one if none is given) as a zip or a folder, with
    all that `forge train` needs to repeat it: configuration, plugins with the hashes of their code, environment, hashes
    of its data, metrics, events, evaluations, and a report. Weights only with --checkpoint; passwords and tokens never.

    \b
    forge runs pack first
    forge train first.zip
    """
    from forge_train_tools.packing.pack import pack as write

    if not as_json:
        show_progress()
    history = open_run(run, Path(run_dir))
    made = write(history, Path(output or f"{history.name}.zip"), _page(history), checkpoint=checkpoint)
    if as_json:
        keys = ("run", "world", "data", "masked", "checkpoint")
        click.echo(dumps({"pack": str(made.path), **{key: made.index[key] for key in keys}}, indent=1))
        return
    hashed = sum(one.get("count", 0) for one in made.index["data"])
    click.echo(f"{made.path}: {made.files} files, {format_bytes(made.bytes)} before compression")
    click.echo(f"  data     {hashed:,} file{'s' * (hashed != 1)} hashed, none included")
    click.echo(f"  weights  {made.index['checkpoint'].rpartition('/')[2] or 'none; --checkpoint includes them'}")
    if made.index["masked"]:
        click.echo(f"  secrets  left out: {', '.join(made.index['masked'])}")
    click.echo(f"Repeat it with: forge train {made.path}")


def _page(history: RunFolder) -> str:
    """The run's report."""
    from .report import report

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        file = Path(folder) / "report.html"
        report.main(["--out", str(file), "--", str(history.path)], standalone_mode=False)
        return file.read_text(encoding="utf-8")

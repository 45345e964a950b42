"""`forge checkpoint import`, `export` and `convert`: checkpoints from and to other programs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from forge_train.base.strict_json import dumps
from forge_train_tools.messages import folded, waiting

from .addresses import FETCHED
from .options import json_option, nproc_option, plugin_options, set_option

if TYPE_CHECKING:
    import torch

    from forge_train_tools.offline.hf_files import Exchanged

PATH = click.Path(path_type=Path)
KEEP = "keep"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_F = TypeVar("_F", bound=Callable[..., Any])


class Dtype(click.ParamType):  # type: ignore[type-arg]  # click before 8.2 has none
    """A dtype by Forge's name or torch's; None for `keep`."""

    name = "dtype"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> torch.dtype | None:
        if value == KEEP:
            return None
        import torch

        full = DTYPES.get(value, value)
        if full not in DTYPES.values():
            self.fail(f"{value!r} is not one of {KEEP}, {', '.join(DTYPES)}.", param, ctx)
        found: torch.dtype = getattr(torch, full)
        return found


class Size(click.ParamType):  # type: ignore[type-arg]  # as above
    """A number of bytes, with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
        unit = UNITS.get(found[2].upper(), 0) if found and found[2] else 1
        if not found or not unit or not (size := int(float(found[1]) * unit)):
            self.fail(f"{value!r} is not a size; write it as 5GB, 500MB or a number of bytes.", param, ctx)
        return size


def dtype_option(function: _F) -> _F:
    """--dtype."""
    text = "Dtype of the written weights: keep, fp32, bf16 or fp16."
    return click.option("--dtype", type=Dtype(), default=KEEP, show_default=True, metavar="DTYPE", help=text)(function)


def shard_option(function: _F) -> _F:
    """--shard-size, passed as `shard_size`."""
    text = "Largest size of one file, such as 500MB."
    return click.option("--shard-size", type=Size(), default="5GB", show_default=True, metavar="SIZE", help=text)(
        function
    )


@click.command("import", short_help="Make a checkpoint from a model in Hugging Face layout, or from a DCP folder.")
@click.argument("source", type=PATH)
@click.argument("path", type=PATH)
@plugin_options
@set_option
@dtype_option
@click.option(
    "--allow-missing",
    multiple=True,
    metavar="PATTERN",
    help="Tensors that SOURCE may lack or have in another shape; their weights start as in a new model.",
)
@click.option(
    "--allow-extra",
    multiple=True,
    metavar="PATTERN",
    help="Tensors that SOURCE may have in addition to the model's; they are left out.",
)
@nproc_option()
@json_option
def import_(
    source: Path,
    path: Path,
    plugins: tuple[str, ...],
    without: tuple[str, ...],
    assignments: tuple[str, ...],
    dtype: torch.dtype | None,
    allow_missing: tuple[str, ...],
    allow_extra: tuple[str, ...],
    nproc: int | None,
    as_json: bool,
) -> None:
    """Make the checkpoint PATH from SOURCE, which holds config.json and safetensors files.

    \b
    forge checkpoint import Qwen3-0.6B qwen
    forge train qwen/config.toml -s text.path=my-texts

    SOURCE may also be a folder of torch.distributed.checkpoint (DCP), such as a checkpoint of torchtitan or of an older
    Forge. torch reads its pickles, with weights_only; no option but --json applies.
    """
    with waiting(f"importing {source}"):
        from forge_train_tools.offline.dcp import import_dcp, is_dcp
        from forge_train_tools.offline.hf_import import import_checkpoint

    if is_dcp(source):
        if any((plugins, without, assignments, dtype, allow_missing, allow_extra, nproc)):
            raise click.UsageError(f"{source} is a DCP folder, and is imported as it is: only --json applies.")
        with waiting(f"importing {source}"):
            done = import_dcp(source, path)
        _say(done, as_json)
        return
    with waiting(f"importing {source}"):
        done = import_checkpoint(
            source,
            path,
            plugins=plugins,
            without=without,
            settings=assignments,
            dtype=dtype,
            allow_missing=allow_missing,
            allow_extra=allow_extra,
            nproc=nproc or 1,
        )
    _say(done, as_json, f"Train it further with: forge train {path / 'config.toml'} -s {done.data}=…")


@click.command(short_help="Write a model in Hugging Face layout, or a checkpoint as torch's DCP.")
@click.argument("path", type=FETCHED)
@click.argument("out", type=PATH)
@click.option(
    "--format", "layout", type=click.Choice(["hf", "dcp"]), default="hf", show_default=True, help="Layout of OUT."
)
@click.option("--adapter", is_flag=True, help="Write only what was added to the base, as a folder of PEFT.")
@set_option
@dtype_option
@shard_option
@nproc_option()
@json_option
def export(
    path: Path,
    out: Path,
    layout: str,
    adapter: bool,
    assignments: tuple[str, ...],
    dtype: torch.dtype | None,
    shard_size: int,
    nproc: int | None,
    as_json: bool,
) -> None:
    """Write the model of PATH to OUT: config.json, safetensors files, and the files of the run's tokenizer. Adapters
    are merged into the weights, unless --adapter asks for them alone.

    With --format dcp, OUT gets the whole checkpoint, optimizer and all, as torch.distributed.checkpoint writes it.
    """
    if layout == "dcp":
        from forge_train_tools.offline.dcp import export_dcp

        if dtype is not None or nproc is not None or adapter or assignments:
            text = "--format dcp writes a checkpoint as it is: --adapter, --set, --dtype and --nproc don't apply."
            raise click.UsageError(text)
        with waiting(f"exporting {path}"):
            done = export_dcp(path, out)
        _say(done, as_json)
        return
    with waiting(f"exporting {path}"):
        from forge_train.checkpoint import checkpoint
        from forge_train.run.run import is_run
        from forge_train_kit.artifacts import Recorder
        from forge_train_tools.offline.adapters import export_adapter
        from forge_train_tools.offline.huggingface import export_checkpoint
        from forge_train_tools.offline.opening import run_folder

    if adapter and (dtype is not None or nproc is not None):
        raise click.UsageError("--adapter writes the added parameters as they are: --dtype and --nproc don't apply.")
    with waiting(f"exporting {path}"):
        if adapter:
            done = export_adapter(path, out, settings=assignments)
        else:
            options: dict[str, Any] = {"dtype": dtype, "shard_bytes": shard_size, "settings": assignments}
            done = export_checkpoint(path, out, nproc=nproc or 1, **options)
    if is_run(run := run_folder(checkpoint.resolve(path))):
        recorder = Recorder(run)
        for file in done.files:
            recorder.record(done.path / file, "forge checkpoint export", "exports")
        recorder.settle()
    _say(done, as_json)


@click.command(short_help="Rewrite a Hugging Face folder in another layout, dtype or number of files.")
@click.argument("source", type=PATH)
@click.argument("out", type=PATH)
@click.option(
    "--architecture", default="", metavar="NAME", help="Architecture of the folder OUT, such as MistralForCausalLM."
)
@click.option(
    "--map",
    "state_map",
    default="",
    metavar="FILE.py:NAME",
    help="A state map from SOURCE's tensors to OUT's, or an HFModel that also has the config.json.",
)
@dtype_option
@shard_option
@plugin_options
@json_option
def convert(
    source: Path,
    out: Path,
    architecture: str,
    state_map: str,
    dtype: torch.dtype | None,
    shard_size: int,
    plugins: tuple[str, ...],
    without: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the model of SOURCE to OUT, both Hugging Face folders. No model is built, and tensors are read a few at a
    time. The tokenizer, the chat template, the generation config, README and LICENSE are copied.

    \b
    forge checkpoint convert Qwen3-0.6B small-files --shard-size 500MB --dtype bf16
    forge checkpoint convert Llama-3.2-1B as-mistral --architecture MistralForCausalLM
    forge checkpoint convert theirs ours --map ./layout.py:MAP
    """
    with waiting(f"converting {source}"):
        from forge_train_tools.offline.convert import convert_folder

        done = convert_folder(
            source,
            out,
            architecture=architecture,
            state_map=state_map,
            dtype=dtype,
            shard_bytes=shard_size,
            plugins=plugins,
            without=without,
        )
    _say(done, as_json)


def _say(done: Exchanged, as_json: bool, next_step: str = "") -> None:
    if as_json:
        result = {"path": str(done.path), "parameters": done.parameters, "files": done.files, "notes": done.notes}
        click.echo(dumps(result))
        return
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    click.echo(f"{done.path}: {done.parameters:,} parameters ({files})")
    for note in done.notes:
        click.secho(folded(f"Note: {note}", sys.stderr), fg="yellow", err=True)
    if next_step:
        click.echo(next_step)

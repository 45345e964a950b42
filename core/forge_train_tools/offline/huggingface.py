"""Writes a model in Hugging Face layout. Plugins map the model and its names (`export_hf`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.base.files import refused, write_json
from forge_train.base.format import format_list
from forge_train.checkpoint import checkpoint
from forge_train.loop.weights import compare_shapes
from forge_train.mesh.world import World
from forge_train.plugin.job import Job
from forge_train_kit import foreign, hookspecs, model_files
from forge_train_kit.full_tensors import SHARD_BYTES
from forge_train_kit.hf import HFModel, fit
from forge_train_kit.hf.folder import CONFIG, table
from forge_train_kit.hf.ranges import Weights
from forge_train_kit.hf.start import exported, merged
from forge_train_kit.model_files import vocabulary_of
from forge_train_kit.stored import places

from ..launching.once import launch_once
from .hf_files import (
    Exchanged,
    TensorFiles,
    appearing,
    common_dtype,
    described,
    in_order,
    put_beside,
    special_tokens,
)
from .opening import Wanted, compose_meta, lone_job, setup_of


def export_checkpoint(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    nproc: int = 1,
    settings: tuple[str, ...] = (),
) -> Exchanged:
    """Write the model of a run (its newest whole checkpoint) or of a checkpoint in Hugging Face layout.

    Args:
        source: a run or a checkpoint, whose contents are verified first.
        target: a folder that does not exist yet or is empty.
        dtype: of the weights; by default, that in the checkpoint.
        shard_bytes: largest size of one file, in bytes.
        nproc: local processes that each write a share of the tensors, including this one.
        settings: values to override, as `--set` takes them.

    Raises:
        ConfigError: for a model that the layout can't express, or a target in use.
        ForgeError: if the disk reports an error; with several processes, the message of the one that failed first.
    """
    source = foreign.resolve(source)
    export = _Export.of(source, dtype, shard_bytes, settings)
    with appearing(target) as part:
        write_json(part / CONFIG, export.config)
        export.files.create(part)
        if nproc == 1:
            export.files.write(part, export.read)
        else:
            _write_together(source, part, dtype, shard_bytes, nproc, settings)
        put_beside(part, export.beside)
        for name, content in export.described.items():
            write_json(part / name, content)
    notes: tuple[str, ...] = ()
    if not vocabulary_of(export.beside):
        notes += ("The run has no tokenizer's files to copy next to the weights.",)
    if export.left_out:
        notes += (f"Left out, because the layout has no place for them: {format_list(export.left_out)}.",)
    return Exchanged(target, export.parameters, tuple(export.files.files), notes)


@dataclass(frozen=True)
class _Export:
    """Export to be written, from a whole checkpoint."""

    config: Mapping[str, Any]
    files: TensorFiles
    read: Callable[[str], Tensor]
    beside: Mapping[str, Path]
    parameters: int
    left_out: Sequence[str]
    """Weights that have no place in the layout."""
    described: Mapping[str, Mapping[str, Any]]
    """Name of a file → contents, which describe how items are read."""

    @classmethod
    def of(cls, source: Path, dtype: torch.dtype | None, shard_bytes: int, settings: Sequence[str]) -> _Export:
        wanted = Wanted(set=tuple(settings), data=False)
        setup = setup_of(source, checkpoint.read_state(source), wanted=wanted)
        beside = model_files.of(setup.config, setup.hooks, source)
        job = lone_job(setup, source, "cpu")
        model = compose_meta(job, text=False)
        layout = exported(job)
        if layout is None:
            raise ConfigError(f"{source}: none of its plugins can write its model in Hugging Face layout (export_hf).")
        where = places(source, job.dist, setup.config.train.init_from)
        compare_shapes(source, model.state_dict(), job.dist, where)  # `config.json` is of the composed model
        left_out = [name for name in model.state_dict() if any(re.fullmatch(one, name) for one in layout.left_out)]
        weights = {name: one for name, one in model.state_dict().items() if name not in left_out}
        stored = Weights({name: where[name] for name in weights})
        views = merged(job, stored.views)
        plan = fit.plan_export(source, layout, views)
        tensors = in_order(plan, dtype, layout.exact)
        special = special_tokens(beside, job)
        padding = _padding(special, layout, job)
        config = {**described(layout, special), **padding, "torch_dtype": common_dtype(tensors)}
        files = TensorFiles.of(tensors, shard_bytes)
        parameters = sum(math.prod(view.shape) for view in views.values())
        items = {name: table(beside[name]) for name in model_files.ITEMS if name in beside}
        changed = layout.described(items) if layout.described else {}
        return cls(config, files, lambda name: plan.read(name, stored.read), beside, parameters, left_out, changed)


def _write_together(
    source: Path, part: Path, dtype: torch.dtype | None, shard_bytes: int, nproc: int, settings: Sequence[str]
) -> None:
    arguments = {
        "source": str(source.absolute()),
        "part": str(part.absolute()),
        "dtype": str(dtype).removeprefix("torch.") if dtype else "",
        "shard_bytes": shard_bytes,
        "settings": [*settings],
    }
    launch_once(f"{__name__}:export_share", arguments, nproc)


def export_share(source: str, part: str, dtype: str, shard_bytes: int, settings: list[str]) -> dict[str, Any]:
    """The work of each process of an export."""
    here = World.here()
    export = _Export.of(Path(source), getattr(torch, dtype) if dtype else None, shard_bytes, settings)
    try:
        export.files.write(Path(part), export.read, rank=here.rank, world=here.size)
    except OSError as error:
        raise refused(Path(part), error) from error
    return {"code": 0}


def _padding(special: Mapping[str, Any], layout: HFModel, job: Job) -> dict[str, Any]:
    """The id of padding, if it is used to find the last token of a text: that of the imported model, unless texts end
    with the same token; else the layout's own."""
    pad = special.get("pad_token_id")
    if "pad_token_id" not in layout.config or pad is None:
        return {}
    stops = hookspecs.tokenizer(job).stops if job.hooks.provider("tokenizer") else ()
    return {} if pad in stops else {"pad_token_id": pad}

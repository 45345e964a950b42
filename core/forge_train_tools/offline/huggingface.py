"""Weights from and to Hugging Face layout. Which model is how named there, plugins tell (`import_hf`, `export_hf`)."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_train.composition.initialise import initial, tied_groups
from forge_train.config.layers import Request, preset
from forge_train.contract.job import Job
from forge_train.contract.protocols import HFModel
from forge_train.ground import disk
from forge_train.ground.errors import ConfigError
from forge_train.ground.files import write_json
from forge_train.ground.present import few
from forge_train.ground.world import World
from forge_train.loop.initial import new_head, noting
from forge_train.loop.weights import Patterns, places
from forge_train.registry.setup import Setup, resolve
from forge_train.registry.write import to_toml
from forge_train.storage import checkpoint, hf_fit, model_files
from forge_train.storage.consolidated import SHARD_BYTES
from forge_train.storage.hf_folder import CONFIG, Folder
from forge_train.storage.model_files import TOKENIZER
from forge_train.storage.ranges import Weights
from forge_train.storage.run import plugin_list

from ..launching.launch import WorkerCommand, launch
from .hf_files import (
    Exchanged,
    TensorFiles,
    appearing,
    check_range,
    comments_in,
    common_dtype,
    in_order,
    put_beside,
    special_tokens,
)
from .hf_request import PRESET, bring
from .opening import compose_meta, lone_job, setup_of

EDITABLE = "config.toml"
"""What is meant to be edited in an imported checkpoint; everything else is sealed."""
# -- import -------------------------------------------------------------------------------------------------------


def import_checkpoint(
    source: Path,
    target: Path,
    *,
    plugins: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    settings: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
) -> Exchanged:
    """Make a checkpoint, of weights only, of a folder in Hugging Face layout.

    Its `config.toml` describes the model for forge and begins with these weights: `forge train TARGET/config.toml`
    trains them further. The tensors pass through memory a few at a time.

    Args:
        source: `config.json` with `model.safetensors`, or with several files and their index.
        target: the checkpoint's folder, which is not there yet.
        plugins: to enable beside the defaults; one of all of them must know the architecture.
        without: to disable.
        settings: `key=value`, as `--set` takes them, over what the folder says.
        dtype: to store; by default, that of each tensor. A model has fp32 parameters, whatever its checkpoint holds.
        allow_missing: patterns of tensors that may be missing or have another shape; their weights start as in a new
            model.
        allow_extra: patterns of tensors that may be there in addition to the model's; they are left out.

    Raises:
        ConfigError: for a folder, an architecture or tensors that can't be imported, and for a pattern that fits
            nothing; nothing is written then.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists; name a new folder.")
    folder = Folder.open(source)
    request = Request(config=PRESET, plugins=plugins, without=without, set=settings)
    layout, setup = _understand(folder, target, request)
    job = lone_job(setup, source, "cpu")
    takes_file = model_files.option(setup.hooks) is not None
    model = compose_meta(job, text=False)
    wanted = {name: (tuple(one.shape), one.dtype) for name, one in model.state_dict().items()}
    head, left_out = new_head(job, layout), list[str]()
    may_lack, may_exceed = Patterns("--allow-missing", allow_missing, head), Patterns("--allow-extra", allow_extra)
    ties = tied_groups(*model.parts)
    plan = hf_fit.plan(
        folder,
        layout,
        wanted,
        tied=ties,
        missing=may_lack.take,
        unexpected=may_exceed.take,
        ignored=noting(Patterns("", (), head), left_out),
    )
    may_lack.check(f"{source} lacks")
    may_exceed.check(f"{source} holds beside the model")
    drawn = [name for name in wanted if name not in plan.targets]
    notes = _tokenizer_notes(folder, job) if takes_file else ()
    if left_out:
        notes = (f"{few(left_out, 8)}, of the folder's own head: left out.", *notes)
    if drawn:
        notes = (f"{few(drawn, 8)} start{'s' if len(drawn) == 1 else ''} as in a new model.", *notes)
    weights = {name: torch.empty(shape, dtype=own, device="meta") for name, (shape, own) in wanted.items()}
    for name, one in weights.items():
        if one.is_floating_point():
            weights[name] = one.to(dtype or (plan.targets[name].dtype if name in plan.targets else one.dtype))
    state = {
        "model": weights,
        "progress": {"step": 0, "tokens": 0},
        "config": setup.config.values(volatile=False),
        "enabled": [entry for entry in plugin_list(setup.hooks) if entry["name"] not in setup.config.neutral],
        "imported": {"from": str(source.absolute()), "architectures": folder.config.get("architectures")},
    }

    def contents(name: str) -> Tensor:
        own = name.removeprefix("model.")
        tensor = torch.empty(weights[own].shape, dtype=weights[own].dtype)
        if own in plan.targets:
            plan.read_into(tensor, own, folder.read)
            check_range(own, tensor, lambda: plan.read(own, folder.read))
        else:
            initial(model, own, tensor, job.seed)
        return tensor

    with tempfile.TemporaryDirectory() as scratch:
        beside = _describe(Path(scratch), folder, target, setup)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.write(target, 0, state, job.dist, beside=beside, contents=contents, editable=(EDITABLE,))
        except OSError as error:
            raise ConfigError(f"{target}: can't be written: {error.strerror or error}.") from error
        finally:
            shutil.rmtree(target.with_name(f".{target.name}.partial"), ignore_errors=True)
    files = tuple(sorted({entry.file.name for entry in folder.tensors.values()}))
    return Exchanged(target, sum(tensor.numel() for tensor in weights.values()), files, notes)


def _understand(folder: Folder, target: Path, request: Request) -> tuple[HFModel, Setup]:
    """How the model is built and named, and the configuration that trains it."""
    request, layout = bring(folder, request)
    train = {**request.sections["train"], "init_from": str(target.absolute())}
    return layout, resolve(dataclasses.replace(request, sections={**request.sections, "train": train}), data=False)


def _describe(scratch: Path, folder: Folder, target: Path, setup: Setup) -> list[Path]:
    """The files that lie beside the tensors. The configuration names them as its neighbours, so that the checkpoint can
    be moved."""
    here = {"train": {**setup.config.as_written.get("train", {}), "init_from": "./"}}
    config = dataclasses.replace(setup.config, as_written={**setup.config.as_written, **here})
    beside = [scratch / EDITABLE, scratch / "plugins.json"]
    if found := model_files.files(folder.path):
        if TOKENIZER in found:
            config = model_files.relative(config, setup.hooks, folder.path)
        model_files.copy(found, scratch / model_files.FOLDER)
        beside.append(scratch / model_files.FOLDER)
    notes = comments_in(preset(PRESET)) | {("train", "init_from"): "the weights that were imported"}
    text = f"# forge train {target.name}/{EDITABLE} -s text.path=YOUR_TEXT\n\n"
    beside[0].write_text(text + to_toml(config, setup.hooks, notes=notes), encoding="utf-8")
    write_json(beside[1], plugin_list(setup.hooks))
    return beside


def _tokenizer_notes(folder: Folder, job: Job) -> tuple[str, ...]:
    if not (folder.path / TOKENIZER).is_file():
        text = f"{folder.path} has no {TOKENIZER}: the configuration reads bytes, which few models were trained on."
        return (f"{text} Name its tokenizer before training on text.",)
    if not job.hooks.provider("tokenizer"):
        return (f"{folder.path / TOKENIZER} can't be used with this model; name another before training on text.",)
    return ()


# -- export -------------------------------------------------------------------------------------------------------


def export_checkpoint(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    nproc: int = 1,
) -> Exchanged:
    """Write the model of a run (its newest whole checkpoint) or of a checkpoint in Hugging Face layout.

    Args:
        source: a run, or a checkpoint; what it holds is verified first.
        target: a folder that is not there yet, or empty.
        dtype: of the weights; by default, what the checkpoint has.
        shard_bytes: largest size of one file, in bytes.
        nproc: local processes that each write a share of the tensors; one is this one.

    Raises:
        ConfigError: for a model that the layout can't express, a target that is in use.
        ForgeError: if the disk refuses; with several processes, the message of the one that failed first.
    """
    source = checkpoint.resolve(source)
    export = _Export.of(source, dtype, shard_bytes)
    with appearing(target) as part:
        write_json(part / CONFIG, export.config)
        export.files.create(part)
        if nproc == 1:
            export.files.write(part, export.read)
        else:
            _write_together(source, part, dtype, shard_bytes, nproc)
        put_beside(part, export.beside)
    notes: tuple[str, ...] = ()
    if TOKENIZER not in export.beside:
        notes += (f"The run has no {TOKENIZER} to put beside the weights.",)
    if export.left_out:
        notes += (f"Left out, because the layout has no place for them: {few(export.left_out)}.",)
    return Exchanged(target, export.parameters, tuple(export.files.files), notes)


@dataclass(frozen=True)
class _Export:
    """What is going to be written, of a checkpoint that is whole."""

    config: Mapping[str, Any]
    files: TensorFiles
    read: Callable[[str], Tensor]
    beside: Mapping[str, Path]
    parameters: int
    left_out: Sequence[str]
    """Weights that the layout has no place for."""

    @classmethod
    def of(cls, source: Path, dtype: torch.dtype | None, shard_bytes: int) -> _Export:
        setup = setup_of(source, checkpoint.read_state(source))
        beside = model_files.of(setup.config, setup.hooks, source)
        job = lone_job(setup, source, "cpu")
        model = compose_meta(job, text=False)
        layout = job.hooks.export_hf()
        if layout is None:
            raise ConfigError(f"{source}: no plugin of it can write its model in Hugging Face layout (export_hf).")
        where = places(source, job.dist, setup.config.train.init_from)
        left_out = [name for name in model.state_dict() if any(re.fullmatch(one, name) for one in layout.left_out)]
        weights = {name: one for name, one in model.state_dict().items() if name not in left_out}
        stored = Weights({name: where[name] for name in weights})
        plan = hf_fit.plan_export(source, layout, stored.views)
        tensors = in_order(plan, dtype, layout.exact)
        special = special_tokens(beside, job)
        padding = _padding(special, layout, job)
        config = {**special, **layout.config, **padding, "torch_dtype": common_dtype(tensors)}
        files = TensorFiles.of(tensors, shard_bytes)
        parameters = sum(tensor.numel() for tensor in weights.values())
        return cls(config, files, lambda name: plan.read(name, stored.read), beside, parameters, left_out)


def _write_together(source: Path, part: Path, dtype: torch.dtype | None, shard_bytes: int, nproc: int) -> None:
    arguments = {
        "source": str(source.absolute()),
        "part": str(part.absolute()),
        "dtype": str(dtype).removeprefix("torch.") if dtype else "",
        "shard_bytes": shard_bytes,
    }
    with tempfile.TemporaryDirectory(prefix="forge-export-") as name:
        folder = Path(name)
        command = WorkerCommand(f"{__name__}:export_share", arguments, folder / "launch", folder / "log", quiet=True)
        launch(command, nproc).check()


def export_share(source: str, part: str, dtype: str, shard_bytes: int) -> dict[str, Any]:
    """What each process of an export does."""
    here = World.here()
    export = _Export.of(Path(source), getattr(torch, dtype) if dtype else None, shard_bytes)
    try:
        export.files.write(Path(part), export.read, rank=here.rank, world=here.size)
    except OSError as error:
        raise disk.refused(Path(part), error) from error
    return {"code": 0}


def _padding(special: Mapping[str, Any], layout: HFModel, job: Job) -> dict[str, Any]:
    """The id of padding where the last token of a text is found by it: that of the imported model, unless texts end
    with the same token; else the layout's own."""
    pad = special.get("pad_token_id")
    if "pad_token_id" not in layout.config or pad is None:
        return {}
    stops = job.hooks.tokenizer().stops if job.hooks.provider("tokenizer") else ()
    return {} if pad in stops else {"pad_token_id": pad}

"""Weights from and to Hugging Face layout. Which model is how named there, plugins tell (`import_hf`, `export_hf`)."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_train.composition.initialise import tied_groups
from forge_train.config.layers import Request, preset
from forge_train.contract.hooks import Hooks
from forge_train.contract.job import Job
from forge_train.contract.protocols import HFModel
from forge_train.ground.errors import ConfigError, ForgeError, describe
from forge_train.ground.files import write_json
from forge_train.loop.weights import places
from forge_train.registry.discovery import discover
from forge_train.registry.setup import Setup, resolve
from forge_train.registry.write import to_toml
from forge_train.state_map import Box
from forge_train.storage import checkpoint, evaluated, hf_fit, model_files
from forge_train.storage.consolidated import SHARD_BYTES
from forge_train.storage.evaluated import MODEL
from forge_train.storage.hf_folder import CONFIG, Folder, table
from forge_train.storage.model_files import TOKENIZER
from forge_train.storage.run import plugin_list

from .hf_files import comments_in, write_tensors
from .opening import compose_meta, lone_job, setup_of

EDITABLE = "config.toml"
"""What is meant to be edited in an imported checkpoint; everything else is sealed."""
PRESET = "finetune"
"""Beneath an imported checkpoint's configuration."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a `config.json` that come from the tokenizer, or from the model that was imported."""


@dataclass(frozen=True)
class Exchanged:
    """What was imported or exported."""

    path: Path
    parameters: int
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What the user should know."""


# -- import -------------------------------------------------------------------------------------------------------


def import_checkpoint(
    source: Path,
    target: Path,
    *,
    plugins: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    settings: tuple[str, ...] = (),
) -> Exchanged:
    """Make a checkpoint, of weights only, of a folder in Hugging Face layout.

    Its `config.toml` describes the model for forge and begins with these weights: `forge train TARGET/config.toml`
    trains them further. The tensors pass through memory a few at a time, and become the dtype of forge's parameters.

    Args:
        source: `config.json` with `model.safetensors`, or with several files and their index.
        target: the checkpoint's folder, which is not there yet.
        plugins: to enable beside the defaults; one of all of them must know the architecture.
        without: to disable.
        settings: `key=value`, as `--set` takes them, over what the folder says.

    Raises:
        ConfigError: for a folder, an architecture or tensors that can't be imported; nothing is written then.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists; name a new folder.")
    folder = Folder.open(source)
    request = Request(config=PRESET, plugins=plugins, without=without, set=settings)
    layout, setup = _understand(folder, target, request)
    job = lone_job(setup, source, "cpu")
    takes_file = model_files.option(setup.hooks) is not None
    model = compose_meta(job, text=False)
    weights = model.state_dict()
    wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    plan = hf_fit.plan(folder, layout, wanted, tied=tied_groups(*model.parts))
    notes = _tokenizer_notes(folder, job) if takes_file else ()
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
        plan.read_into(tensor, own, folder.read)
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
    request, layout = _brought(folder, request)
    setup = resolve(request, data=False)
    started = dataclasses.replace(setup.config.train, init_from=str(target.absolute()))  # which asks for a text
    return layout, Setup(dataclasses.replace(setup.config, train=started), setup.hooks)


def starting_from(request: Request) -> Request:
    """A request with the model and tokenizer of the folder that it is to start from; no tensor is read.

    Args:
        request: whose `model_from` is in Hugging Face layout. Without a configuration it has that of fine-tuning.

    Raises:
        ConfigError: for a folder or an architecture that can't be imported.
    """
    source = Path(request.model_from)
    asked = dataclasses.replace(request, config=request.config or PRESET, model_from="")
    brought, _ = _brought(Folder.open(source), asked)
    train = {**brought.sections["train"], "init_from": str(source.absolute())}
    return dataclasses.replace(brought, sections={**brought.sections, "train": train})


def _brought(folder: Folder, request: Request) -> tuple[Request, HFModel]:
    """A request with the sections that a folder's model and tokenizer have, and how that model is named."""
    file = folder.path / CONFIG
    folder.check_sizes()
    request = dataclasses.replace(request, sections_from=str(file))
    bare = resolve(request, training=False)
    hooks, sequence = bare.hooks, bare.config.train.sequence
    try:
        layout = hooks.import_hf(folder.config)
    except ForgeError as error:
        raise ConfigError(f"{folder.path}: {error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"{file}: a value has another type than is expected: {describe(error)}") from error
    if layout is None:
        raise ConfigError(f"{file}: {_unknown(folder.config, hooks)}")
    longest = folder.config.get("max_position_embeddings")
    train = {"sequence": min(sequence, longest) if isinstance(longest, int) else sequence}
    sections: dict[str, Mapping[str, Any]] = {**layout.sections, "train": train}
    if (folder.path / TOKENIZER).is_file() and (place := model_files.option(hooks)):
        sections[place[0]] = {**sections.get(place[0], {}), place[1]: str(folder.path.absolute())}
    return dataclasses.replace(request, sections=sections), layout


def _unknown(config: Mapping[str, Any], hooks: Hooks) -> str:
    """What is said of an architecture that no enabled plugin reads: those that are known, and who else knows it."""
    named = config.get("architectures") or [config.get("model_type")]
    asked = ", ".join(hooks.implementers("import_hf")) or "none"
    known = sorted({name for one in hooks.enabled.values() for name in one.cls.architectures})
    others = [one.name for one in discover() if set(one.architectures) & set(named) and one.name not in hooks.enabled]
    text = f"no enabled plugin knows the architecture {named!r} (asked: {asked}). Known: {', '.join(known) or 'none'}."
    return f"{text} Enable {' or '.join(others)} with --plugins." if others else text


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
        text = f"{folder.path} has no {TOKENIZER}: the configuration reads bytes, as few models have learned to."
        return (f"{text} Name its tokenizer before training on text.",)
    if not job.hooks.provider("tokenizer"):
        return (f"{folder.path / TOKENIZER} can't be used with this model; name another before training on text.",)
    return ()


# -- export -------------------------------------------------------------------------------------------------------


def export_checkpoint(
    source: Path, target: Path, *, dtype: torch.dtype = torch.float32, shard_bytes: int = SHARD_BYTES
) -> Exchanged:
    """Write the model of a run (its newest whole checkpoint) or of a checkpoint in Hugging Face layout.

    Args:
        source: a run, or a checkpoint; what it holds is verified first.
        target: a folder that is not there yet, or empty.
        dtype: what the weights are stored as.
        shard_bytes: the most that is put into one file.

    Raises:
        ConfigError: for a model that the layout can't express, a target that is in use.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; name a new folder.")
    source = checkpoint.resolve(source)
    setup = setup_of(source, checkpoint.read_state(source))
    beside = model_files.of(setup.config, setup.hooks, source)
    job = lone_job(setup, source, "cpu")
    model = compose_meta(job, text=False)
    layout = job.hooks.export_hf()
    if layout is None:
        raise ConfigError(f"{source}: no plugin of it can write its model in Hugging Face layout (export_hf).")
    where = places(source, job.dist, setup.config.train.init_from)
    shapes = {at: checkpoint.shapes(at) for at in set(where.values())}
    stored = {name: shapes[where[name]][f"{MODEL}{name}"] for name in model.state_dict()}
    plan = hf_fit.plan_export(source, layout, stored)

    @lru_cache(maxsize=1)  # the targets of a group come one after the other, and experts are cut from one tensor
    def whole(name: str) -> Tensor:
        return evaluated.read_one(where[name], name, *stored[name])

    def fetch(name: str, box: Box) -> Tensor:
        return whole(name)[tuple(slice(*bounds) for bounds in box)]

    part = target.with_name(f".{target.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        special = _special_tokens(beside, job)
        described = {
            **special,
            **layout.config,
            **_padding(special, layout, job),
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        write_json(part / CONFIG, described)
        files = write_tensors(
            part,
            {name: plan.targets[name].shape for group in plan.groups for name in group.targets},
            dtype,
            lambda name: plan.read(name, fetch),
            shard_bytes=shard_bytes,
        )
        for name, file in beside.items():
            if name != CONFIG:
                (part / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, part / name)
        part.replace(target)
    except OSError as error:
        raise ForgeError(f"{target}: can't be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    notes = () if TOKENIZER in beside else (f"The run has no {TOKENIZER} to put beside the weights.",)
    parameters = sum(tensor.numel() for tensor in model.state_dict().values())
    return Exchanged(target, parameters, tuple(file.name for file in files), notes)


def _padding(special: Mapping[str, Any], layout: HFModel, job: Job) -> dict[str, Any]:
    """The id of padding where the last token of a text is found by it: that of the imported model, unless texts end
    with the same token; else the layout's own."""
    pad = special.get("pad_token_id")
    if "pad_token_id" not in layout.config or pad is None:
        return {}
    stops = job.hooks.tokenizer().stops if job.hooks.provider("tokenizer") else ()
    return {} if pad in stops else {"pad_token_id": pad}


def _special_tokens(beside: Mapping[str, Path], job: Job) -> dict[str, Any]:
    """The ids of special tokens for `config.json`: as the imported model had them, else the tokenizer's."""
    if CONFIG in beside:
        own = table(beside[CONFIG])
        return {key: own[key] for key in SPECIAL if key in own}
    if not job.hooks.provider("tokenizer"):
        return {}
    tokenizer = job.hooks.tokenizer()
    begin = tokenizer.begin[0] if len(tokenizer.begin) == 1 else None
    stops = [*tokenizer.stops] if len(tokenizer.stops) > 1 else tokenizer.end
    return {"bos_token_id": begin, "eos_token_id": stops, "pad_token_id": None}

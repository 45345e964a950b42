"""Converts one Hugging Face layout to another, a few tensors at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forge_train.base.errors import ConfigError, describe, nearest
from forge_train.base.files import write_json
from forge_train.compose.initialise import tied_groups
from forge_train.store.tensor_files import DTYPES
from forge_train_kit import model_files
from forge_train_kit.facts import ARCHITECTURES
from forge_train_kit.format import format_lines
from forge_train_kit.full_tensors import SHARD_BYTES
from forge_train_kit.hf import HFModel, fit
from forge_train_kit.hf.folder import CONFIG, PACKED, Folder
from forge_train_kit.hf.start import exported
from forge_train_kit.state_map import Plan, StateMap
from forge_train_kit.state_map.named import named
from forge_train_kit.state_map.views import Stored

from ..configuration.request import Request
from ..configuration.setup import resolve
from .hf_files import Exchanged, TensorFiles, appearing, common_dtype, described, in_order, put_beside, special_tokens
from .hf_request import ANY, PRESET, bring
from .opening import compose_meta, lone_job

STORED = {name: dtype for dtype, name in DTYPES.items()}
DOCUMENTS = ("README*", "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Files about a model that are copied along with it."""
DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys for the dtype in a `config.json`, new and old."""


def convert_folder(
    source: Path,
    target: Path,
    *,
    architecture: str = "",
    state_map: str = "",
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    plugins: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
) -> Exchanged:
    """Rewrite a model in Hugging Face layout: in another layout, another dtype or other files.

    Args:
        source: the folder to read.
        target: the folder to write, which must be new or empty.
        architecture: the new `architectures` of the `config.json`; a plugin must know it and the source's architecture.
        state_map: `FILE.py:NAME` or `package.module:NAME` of a state map from the source's tensors to the target's, of
            an `HFModel` that also has the new `config.json`, or of a function that makes either from the old one.
        dtype: of the weights; by default, each tensor keeps its own.
        shard_bytes: largest size of one file, in bytes.
        plugins: to enable for `architecture`, in addition to the defaults.
        without: to disable.

    Raises:
        ConfigError: for a folder or tensors that can't be converted, or a target in use; nothing is written then.
    """
    if architecture and state_map:
        raise ConfigError("--architecture and --map both describe the new layout; give only one of them.")
    folder = Folder.open(source)
    if architecture:
        request = Request(config=PRESET, plugins=plugins, without=without)
        plan, config = _to_architecture(folder, architecture, request)
    else:
        plan, config = _to_map(folder, state_map) if state_map else (_as_it_is(folder, dtype), folder.config)
    tensors = in_order(plan, dtype)
    documents = {file.name: file for one in DOCUMENTS for file in sorted(source.glob(one)) if file.is_file()}
    beside, files = model_files.files(source) | documents, TensorFiles.of(tensors, shard_bytes)
    with appearing(target) as part:
        write_json(part / CONFIG, _with_dtype(config, common_dtype(tensors)))
        files.create(part)
        files.write(part, lambda name: plan.read(name, folder.read))
        put_beside(part, beside)
    return Exchanged(target, sum(torch.Size(shape).numel() for shape, _ in tensors.values()), tuple(files.files))


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    keys = [key for key in DTYPE_KEYS if key in config] or [DTYPE_KEYS[-1]]
    return {**config, **dict.fromkeys(keys, dtype)}


def _described(folder: Folder, leftovers: HFModel | None = None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    found = {name: one for name, one in folder.tensors.items() if not (leftovers and leftovers.is_leftover(name))}
    if odd := [f"{name}: stored as {one.dtype}" for name, one in found.items() if one.dtype not in STORED]:
        raise ConfigError(f"{folder.path}: unknown dtypes:{format_lines(odd)}")
    return {name: (one.shape, STORED[one.dtype]) for name, one in found.items()}


def _as_it_is(folder: Folder, dtype: torch.dtype | None) -> Plan:
    packed = [f"{name}: stored as {one.dtype}" for name, one in folder.tensors.items() if one.dtype in PACKED]
    if dtype and packed:
        raise ConfigError(
            f"{folder.path} is quantised, but a tensor without its scale has no meaning in another dtype. Name the "
            f"layout that dequantises it with --architecture or --map.{format_lines(packed)}"
        )
    return Plan({name: Stored(*one, name) for name, one in _described(folder).items()})


def _to_map(folder: Folder, spec: str) -> tuple[Plan, Mapping[str, Any]]:
    found = named(spec, "--map")
    if callable(found) and not isinstance(found, (StateMap, HFModel, type)):
        try:
            found = found(dict(folder.config))
        except ConfigError:
            raise
        except Exception as error:  # the function may raise anything
            raise ConfigError(f"--map: {spec} failed for {folder.path / CONFIG}: {describe(error)}.") from error
    if isinstance(found, StateMap):
        found = HFModel(found)
    if not isinstance(found, HFModel):
        raise ConfigError(f"--map: {spec} is a {type(found).__name__}; expected a StateMap or an HFModel.")
    try:
        plan = found.map.plan(_described(folder, found))
    except ConfigError as error:
        raise ConfigError(f"{folder.path}: {error}") from error
    return plan, found.config or folder.config


def _to_architecture(folder: Folder, architecture: str, request: Request) -> tuple[Plan, Mapping[str, Any]]:
    """Convert through the names of a model that both layouts describe; it is only composed on the meta device."""
    request, layout = bring(folder, request)
    hooks = resolve(request, training=False).hooks
    provider = hooks.provider("build_model")
    known = [one for one in ARCHITECTURES.of(hooks.plugins[provider]) if one != ANY] if provider else []
    if provider is None or architecture not in known or not hasattr(hooks.plugins[provider].config, "architecture"):
        hint = nearest(architecture, known) or f" Known: {', '.join(known) or 'none'}."
        raise ConfigError(f"--architecture: no enabled plugin writes {architecture!r}.{hint}")
    sections = {**request.sections, provider: {**request.sections.get(provider, {}), "architecture": architecture}}
    setup = resolve(dataclasses.replace(request, sections=sections), data=False, opened=True)
    job = lone_job(setup, folder.path, "cpu")
    model = compose_meta(job, text=False)
    wanted = {name: (tuple(one.shape), one.dtype) for name, one in model.state_dict().items()}
    inner = fit.plan(folder, layout, wanted, tied=tied_groups(*model.parts))
    try:
        there = exported(job)
    except ConfigError as error:
        raise ConfigError(f"{folder.path}: {error}\nName another one with --architecture.") from error
    assert there is not None, "it has architectures"
    plan = fit.plan_export(folder.path, there, inner.targets)
    return plan, described(there, special_tokens(model_files.files(folder.path), job))

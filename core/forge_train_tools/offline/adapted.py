"""Adapters of PEFT, merged into a model that is open."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.checkpoint import checkpoint
from forge_train.compose.compose import compose
from forge_train.compose.initialise import declared_init, fill, local_window
from forge_train.mesh.layout import Device
from forge_train.mesh.tensors import full_tensor
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train.store.shards import Box, whole
from forge_train_kit.facts import ADDS, tuners
from forge_train_kit.hf.folder import is_hugging_face
from forge_train_kit.hf.start import merged
from forge_train_kit.state_map.views import Stored, read, reads

from ..configuration.request import Request
from ..configuration.setup import resolve
from ..sources import as_assignments, continuing
from .hf_request import starting_from
from .opening import Opened, Wanted, lone_job, setup_of

_ITS_START = ("train.init_missing", "train.init_unexpected", "train.init_map", "checkpoint.only")
"""Values of a run that say what weights it began with."""


def add_adapters(opened: Opened, adapters: Mapping[str, float], plugins: tuple[str, ...] = ()) -> None:
    """Add each adapter's change of the weights, times a factor, as `forge checkpoint export` merges it; in fp32.

    Every rank must call it. Each changes what it holds, and has one weight at a time whole.

    Args:
        opened: the base.
        adapters: folder of PEFT → factor.
        plugins: those that the base was opened with.

    Raises:
        ConfigError: for what is no such folder, an adapter of another model, and a base with updates of its own.
    """
    own = [name for name, one in opened.job.hooks.enabled.items() if ADDS.of(one.cls)]
    if adapters and own:
        raise ConfigError(
            f"--adapter {next(iter(adapters))}: the model of {opened.path} has updates of its own ({', '.join(own)}). "
            f"Merge them first, and name that folder: forge checkpoint export {opened.path} NEW"
        )
    weights, total = opened.model.state_dict(), dict[str, Tensor]()
    with torch.no_grad():
        for folder, factor in adapters.items():
            for name, change in _changes(opened, weights, folder, plugins):
                total[name] = total.get(name, 0) + factor * change
        for name, change in total.items():
            held, _ = local_window(weights[name])
            held.copy_(held.float() + change.to(held.device))


def _changes(
    opened: Opened, weights: Mapping[str, Tensor], folder: str, plugins: tuple[str, ...]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights, and what an adapter adds to this rank's part of each. The base's weights are read as they are
    open: where they lie may be known to the command alone."""
    stages = opened.job.dist.gather_stages({name: tuple(one.shape) for name, one in weights.items()})
    base = {name: shape for stage in stages for name, shape in stage.items()}
    job = lone_job(_setup(opened, folder, plugins), opened.path, cast("Device", opened.job.device.type))
    added = _added(job, base)
    shapes = {**base, **{name: tuple(one.shape) for name, one in added.items()}}
    stored = {name: Stored(shape, torch.float32, name) for name, shape in shapes.items()}
    for name, view in merged(job, stored).items():
        if isinstance(view, Stored) and view.name == name:
            continue
        if name not in base:
            raise ConfigError(f"--adapter {folder}: it changes {name!r}, which the model of {opened.path} lacks.")
        if name not in weights:
            continue
        needed = {one for one, _ in reads(view, whole(view.shape))}
        tensors = {one: added[one] if one in added else full_tensor(weights[one]) for one in sorted(needed)}

        def fetch(one: str, box: Box, tensors: Mapping[str, Tensor] = tensors) -> Tensor:
            return tensors[one][tuple(slice(*bounds) for bounds in box)].float()

        held, window = local_window(weights[name])
        yield name, read(view, tuple(window), fetch).to(held.device) - held.float()


def _added(job: Job, base: Collection[str]) -> dict[str, Tensor]:
    """The parameters that a job's model has beside those of its base, with their values."""
    composition = compose(job, allocate=False, extra=False)
    found = {}
    for part in composition.model.parts:
        for name, one in part.named_parameters():
            if name not in base:
                found[name] = torch.empty(one.shape, dtype=one.dtype, device=job.device)
                fill(found[name], name, composition.starts.get(name) or declared_init(part, name), job.seed)
    return found


def _setup(opened: Opened, folder: str, plugins: tuple[str, ...]) -> Setup:
    """The base with the plugin that reads the adapter, and without those that say what of it is trained."""
    path = opened.path
    if is_hugging_face(path):
        asked = Request(model_from=str(path), plugins=plugins, set=("checkpoint.only=[]",))  # nothing is saved
        request = starting_from(continuing(asked, folder, path))
        return resolve(request, data=False, opened=True, measured=False)
    asked = Request(set=tuple(as_assignments({"train.init_from": path.absolute()})))
    more = continuing(asked, folder, path)
    without = tuners(opened.job)
    wanted = Wanted(more.plugins, more.set, data=False, left_out=_ITS_START, without=without, environment="")
    return setup_of(path, checkpoint.read_state(path), wanted=wanted)

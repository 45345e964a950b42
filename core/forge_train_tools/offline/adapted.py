"""Adapters of PEFT, merged into a model that is open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError
from forge_train.checkpoint import checkpoint
from forge_train.compose.compose import compose
from forge_train.mesh.layout import Device
from forge_train.registry.setup import Setup
from forge_train.store.shards import Box
from forge_train_kit.facts import ADDS, tuners
from forge_train_kit.hf.folder import is_hugging_face
from forge_train_kit.hf.start import merged
from forge_train_kit.state_map.views import Stored, read

from ..configuration.request import Request
from ..configuration.setup import resolve
from ..sources import as_assignments, continuing
from .hf_request import starting_from
from .opening import Opened, Wanted, lone_job, setup_of

_ITS_START = ("train.init_missing", "train.init_unexpected", "train.init_map", "checkpoint.only")
"""Values of a run that say what weights it began with."""


def add_adapters(opened: Opened, adapters: Mapping[str, float], plugins: tuple[str, ...] = ()) -> None:
    """Add each adapter's change of the weights, times a factor, as `forge checkpoint export` merges it; in fp32.

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
    weights = opened.model.state_dict()
    total: dict[str, Tensor] = {}
    for folder, factor in adapters.items():
        for name, change in _changes(opened, folder, plugins).items():
            if name not in weights:
                raise ConfigError(f"--adapter {folder}: it changes {name!r}, which the model of {opened.path} lacks.")
            total[name] = total.get(name, 0) + factor * change
    with torch.no_grad():
        for name, change in total.items():
            weights[name].copy_(weights[name].float() + change)


def _changes(opened: Opened, folder: str, plugins: tuple[str, ...]) -> dict[str, Tensor]:
    """Weight → what an adapter adds to it. Its model has the base's weights as they are open: where they lie may be
    known to the command alone."""
    device = cast("Device", opened.job.device.type)
    job = lone_job(_setup(opened, folder, plugins), opened.path, device)
    tensors = compose(job, extra=False).model.state_dict()
    with torch.no_grad():
        for name, one in opened.model.state_dict().items():
            tensors[name].copy_(one)

    def fetch(name: str, box: Box) -> Tensor:
        return tensors[name][tuple(slice(*bounds) for bounds in box)].float()

    stored = {name: Stored(tuple(one.shape), torch.float32, name) for name, one in tensors.items()}
    return {
        name: read(view, tuple((0, size) for size in view.shape), fetch) - tensors[name].float()
        for name, view in merged(job, stored).items()
        if not isinstance(view, Stored) or view.name != name
    }


def _setup(opened: Opened, folder: str, plugins: tuple[str, ...]) -> Setup:
    """The base with the plugin that reads the adapter, and without those that say what of it is trained."""
    path = opened.path
    if is_hugging_face(path):
        asked = Request(model_from=str(path), plugins=plugins, set=("checkpoint.only=[]",))  # nothing is saved
        request = starting_from(continuing(asked, folder, path))
        return resolve(request, data=False, opened=True, measured=False)
    asked = Request(set=tuple(as_assignments({"train.init_from": path.absolute()})))
    more = continuing(asked, folder, path)
    wanted = Wanted(more.plugins, more.set, data=False, left_out=_ITS_START, without=tuners(opened.job))
    return setup_of(path, checkpoint.read_state(path), wanted=wanted)

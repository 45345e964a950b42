"""The device of a process."""

from __future__ import annotations

import os

import torch

from ..base.errors import ConfigError
from .layout import Device
from .world import World

ALONE = World()


def choose_device(wanted: Device, world: World = ALONE) -> torch.device:
    """The device of this process.

    Raises:
        ConfigError: if the wanted one is not there.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = 'cuda', but torch finds no CUDA device here; use 'auto' or 'cpu'.")
    if wanted == "cuda" and world.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"Local rank {world.local_rank} has no CUDA device of its own: there are {torch.cuda.device_count()}. "
            "Start fewer processes, or say run.device = 'cpu'."
        )
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("run.device = 'mps', but torch finds no Metal device here; use 'auto' or 'cpu'.")
    if wanted == "mps" and world.size > 1:
        raise ConfigError("run.device = 'mps' works in one process only; use 'cpu' for several.")
    return torch.device(wanted, world.local_rank) if wanted == "cuda" else torch.device(wanted)


def start_cuda(device: torch.device) -> None:
    """Make a CUDA device the current one, before anything is allocated on it.

    Its allocator may grow segments, which avoids fragments between tensors of many sizes, unless the environment
    configures the allocator.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    torch.cuda.set_device(device)

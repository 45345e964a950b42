"""The number of processes for `--nproc auto`."""

from __future__ import annotations

import math
from pathlib import Path

from forge_train.base.errors import ConfigError

from ..configuration.request import Request, lay, tiling_axes
from .world import here

DRIVERS = ("nvidia[0-9]*", "kfd", "dxg")
"""Files in /dev of NVIDIA's, AMD's and WSL's drivers."""


def how_many(request: Request) -> int:
    """One process for each CUDA device, or as many as the product of the configured axes' sizes; 1 if a launcher
    started this process, if the run uses another device, or if there are no CUDA devices."""
    if here().launcher != "none":
        return 1
    try:
        tree = lay(request)
    except ConfigError:  # reported by the next reader
        return 1
    device = tree.values.get(("run", "device"))
    if device is not None and device.value not in ("auto", "cuda"):
        return 1
    count = cuda_devices()
    sizes = {key[0]: value.value for key, value in tree.below(("parallel",)).items()}
    if str(sizes.get("dp_shard", -1)) == "-1":
        return max(count, 1)
    try:
        return min(math.prod(int(sizes.get(axis, 1)) for axis in tiling_axes()), max(count, 1))
    except (TypeError, ValueError):  # reported by the next reader
        return 1


def cuda_devices() -> int:
    """The number of devices that torch would see. torch is imported only if the machine has a driver."""
    if not any(True for driver in DRIVERS for _ in Path("/dev").glob(driver)):
        return 0
    import torch

    return torch.cuda.device_count()

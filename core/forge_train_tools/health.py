"""Health checks of processes, devices, disk and clocks: known answers, and times that ranks can compare."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from forge_train.base.format import format_bytes
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Device, Layout
from forge_train.mesh.world import World

from .launching.meeting import meet

PERIOD = 7
SIZES = {"cuda": 4095, "cpu": 525, "mps": 1050}
"""Rows and columns of the product, multiples of PERIOD, by device."""
REDUCED = 1 << 20
"""Elements of the all-reduce."""
WRITTEN = 8 << 20
"""Bytes written to the disk."""
ROOM = 2**30
"""Bytes below which the disk is called nearly full."""
SKEW = 2.0
"""Seconds that clocks of different hosts may differ by."""
Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Finding of a check."""

    name: str
    status: Status
    """`fail`: the numbers of a run can't be trusted, or it can't be written."""
    text: str


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank."""

    host: str
    device: str
    wrong: int
    """Elements of the product that are not what they must be."""
    product_seconds: float
    wrong_sums: int
    """The same of the all-reduce."""
    reduce_seconds: float
    clock: float
    """Seconds since the epoch, when all ranks had come."""
    complaints: tuple[str, ...] = ()
    """Of the device itself."""


def look(dist: DistributedContext, folder: Path, slow: float) -> list[Finding]:
    """Measure, and compare ranks; all of them call this, and all get the same.

    Args:
        dist: the processes.
        folder: where files are written.
        slow: a product that takes so many times the median of all ranks is slow.
    """
    wrong, seconds = product(dist.device)
    wrong_sums, reduce_seconds = all_reduce(dist)
    dist.barrier()
    mine = Measured(
        *(socket.gethostname(), str(dist.device), wrong, seconds, wrong_sums, reduce_seconds, time.time()),
        complaints=tuple(complaints(dist.device)),
    )
    everybody = dist.gather_objects(mine)
    return [*compare(everybody, slow), *dist.on_main(lambda: list(disk(folder)))]


def known_product(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two matrices of small integers and their product, each `[size, size]` float32.

    Rows and columns repeat with PERIOD, so the product is size / PERIOD times a table of PERIOD × PERIOD. All sums are
    integers below 2²⁴: exact in float32 and TF32, in whatever order they are added.
    """
    places = range(PERIOD)
    a = [[(i * i + 3 * k**3 + i * k) % PERIOD - 3 for k in places] for i in places]
    b = [[(2 * k * k + k * j + j**3) % PERIOD - 2 for j in places] for k in places]
    table = [[sum(a[i][k] * b[k][j] for k in places) for j in places] for i in places]
    times = size // PERIOD
    whole = (torch.tensor(one, dtype=torch.float32).repeat(times, times) for one in (a, b, table))
    one, other, answer = whole
    return one, other, answer * times


def product(device: torch.device) -> tuple[int, float]:
    """Elements of a known product that come out wrong on a device, and the seconds it takes: the best of three."""
    one, other, answer = (part.to(device) for part in known_product(SIZES.get(device.type, 525)))
    seconds, wrong = [], 0
    for _ in range(3):
        elapsed = stopwatch(device)
        differs = one @ other != answer
        seconds.append(elapsed())
        wrong += int(differs.sum())
    return wrong, min(seconds)


def all_reduce(dist: DistributedContext) -> tuple[int, float]:
    """Elements of a known sum over all ranks that come out wrong, and the seconds it takes, the better of two."""
    places = torch.arange(REDUCED, device=dist.device) % 13
    answer = (places * (dist.world * (dist.world + 1) // 2)).float()
    seconds, wrong = [], 0
    for _ in range(2):
        mine = (places * (dist.rank + 1)).float()
        dist.barrier()
        elapsed = stopwatch(dist.device)
        found = dist.all_reduce(mine)
        seconds.append(elapsed())
        wrong += int((found != answer).sum())
    return wrong, min(seconds)


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Start a clock that returns the seconds until the device has done its work so far, by its own clock if it is a
    CUDA device: a busy host is late to launch what it is given, and late to see that it is done."""
    if device.type != "cuda":
        began = time.perf_counter()
        return lambda: time.perf_counter() - began
    begin = mark()

    def seconds() -> float:
        end = mark()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return seconds


def mark() -> Any:
    """An event where the current CUDA stream is now, with its time."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def compare(everybody: list[Measured], slow: float) -> Iterator[Finding]:
    """Compare the measurements of all ranks."""
    for what, wrong in (
        ("product", {rank: one.wrong for rank, one in enumerate(everybody) if one.wrong}),
        ("all-reduce", {rank: one.wrong_sums for rank, one in enumerate(everybody) if one.wrong_sums}),
    ):
        for rank, count in wrong.items():
            where = f"rank {rank} ({everybody[rank].device} on {everybody[rank].host})"
            yield Finding(what, "fail", f"{where} computes {count} elements of a known {what} wrong")
    times = [one.product_seconds for one in everybody]
    usual = median(times)
    for rank, taken in enumerate(times):
        if taken > slow * usual:
            where = f"rank {rank} ({everybody[rank].device} on {everybody[rank].host})"
            yield Finding("speed", "warn", f"{where} takes {taken / usual:.1f} × the median for the same product")
    yield Finding("product", "ok", f"{1e3 * min(times):.1f} to {1e3 * max(times):.1f} ms on {len(times)} ranks")
    if len(everybody) > 1:
        took = max(one.reduce_seconds for one in everybody)
        rate = 2 * (len(everybody) - 1) / len(everybody) * 4 * REDUCED / took / 1e9
        yield Finding("all-reduce", "ok", f"{format_bytes(4 * REDUCED)} in {1e3 * took:.1f} ms: {rate:.2f} GB/s")
        hosts = {one.host: one.clock for one in everybody}
        first, last = min(hosts, key=lambda host: hosts[host]), max(hosts, key=lambda host: hosts[host])
        apart = hosts[last] - hosts[first]
        status: Status = "warn" if apart > SKEW else "ok"
        yield Finding("clock", status, f"{apart:.1f} s between {first} and {last}")
    for rank, one in enumerate(everybody):
        for text in one.complaints:
            yield Finding("device", "warn", f"rank {rank} ({one.device} on {one.host}): {text}")


def disk(folder: Path) -> Iterator[Finding]:
    """Room, and the rate of a write that is flushed."""
    try:
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(WRITTEN))
            file.flush()
            os.fsync(file.fileno())
        rate = WRITTEN / (time.perf_counter() - began) / 1e6
    except OSError as error:
        yield Finding("disk", "fail", f"{folder}: can't be written: {error.strerror or error}")
        return
    free = shutil.disk_usage(folder).free
    yield Finding("disk", "ok" if free > ROOM else "warn", f"{folder}: {format_bytes(free)} free, {rate:.0f} MB/s")


def complaints(device: torch.device) -> Iterator[str]:
    """Yield NVML's complaints about a CUDA device, if its Python module (nvidia-ml-py) is installed."""
    if device.type != "cuda":
        return
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # the module, the driver or the device may be missing, each with an error of its own
        return
    yield from device_complaints(nvml, handle)


def device_complaints(nvml: Any, handle: Any) -> Iterator[str]:
    """Yield the faults of one device."""
    try:
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    except nvml.NVMLError:  # a device without ECC
        errors = 0
    if errors:
        yield f"{errors} uncorrected memory errors since the driver was loaded"
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except nvml.NVMLError:
        return
    for name, words in (
        ("nvmlClocksThrottleReasonHwSlowdown", "the hardware slows it down (heat, or power)"),
        ("nvmlClocksThrottleReasonSwThermalSlowdown", "the driver slows it down because of heat"),
    ):
        if reasons & getattr(nvml, name):
            yield words


def worker(folder: str, device: Device, slow: float) -> Mapping[str, Any]:
    """Run one process of `forge doctor --nproc N`."""
    with DistributedContext.join(Layout(dp_shard=World.here().size), device, meet=meet) as dist:
        return {"code": 0, "findings": [asdict(one) for one in look(dist, Path(folder), slow)]}

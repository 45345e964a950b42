"""The checks of `forge doctor`. They are independent: one that fails does not hide another."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forge_train import __version__
from forge_train.base.errors import ConfigError, describe
from forge_train.base.format import format_bytes
from forge_train.registry.discovery import DISTRIBUTION, discover, load
from forge_train_kit.format import format_plural
from forge_train_tools.configuration.request import Request
from forge_train_tools.sources import PRESET

from .lazy import GROUP

SLOW = 1.5
"""A process is slow if it takes this many times the median of all processes for the same product."""
ROOM = 2**30
"""Free bytes below which the disk is called nearly full."""


@dataclass(frozen=True)
class Check:
    """The result of a check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    """`fail`: training could not start. `warn`: something else will not work."""
    text: str


def checkup(run_dir: Path, nproc: int | None = None) -> Iterator[Check]:
    """Run all checks.

    Args:
        run_dir: the folder for runs.
        nproc: number of processes to start and compare.
    """
    checks: list[Callable[[], Iterator[Check]]] = [
        _forge,
        _command,
        _requirements,
        _torch,
        _all_reduce,
        lambda: _disk(run_dir),
        _plugins,
        _commands,
        _start,
        *([lambda: _several(nproc)] if nproc else []),
    ]
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # a broken machine may raise anything
            yield Check(getattr(check, "__name__", "check").strip("_<>"), "fail", describe(error))


def _forge() -> Iterator[Check]:
    yield Check("forge", "ok", f"{DISTRIBUTION} {__version__} in {sys.prefix}")
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs")


def _command() -> Iterator[Check]:
    """Check that `forge` is ours: pip silently overwrites a script of that name."""
    scripts = importlib.metadata.entry_points(group="console_scripts", name="forge")
    others = sorted({point.dist.metadata["Name"] for point in scripts if point.dist} - {DISTRIBUTION})
    if others:
        text = f"{', '.join(others)} installs a `forge` too, and one has replaced the other; ours is also `forge-train`"
        yield Check("command", "warn", text)
        return
    found = shutil.which("forge")
    if found and Path(found).parent.resolve() != Path(sys.executable).parent.resolve():
        text = f"the `forge` on the PATH is {found}, which is not in this environment, {sys.prefix}"
        yield Check("command", "warn", text)
        return
    yield Check("command", "ok", found or "`forge` is not on the PATH; `python -m forge_train_cli` does the same")


def _requirements() -> Iterator[Check]:
    wanted = importlib.metadata.requires(DISTRIBUTION) or []
    names = [re.split(r"[^\w.-]", line)[0] for line in wanted if "extra ==" not in line]
    missing, there = [], []
    for name in names:
        try:
            there.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Check("packages", "fail", f"not installed: {', '.join(missing)}. pip install {' '.join(missing)}")
    yield Check("packages", "ok", ", ".join(there))


def _torch() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:  # a broken build may raise anything
        yield Check("torch", "fail", f"can't be imported: {describe(error)}")
        return
    yield Check("torch", "ok", f"{torch.__version__}, {format_plural(torch.get_num_threads(), 'thread')}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            known = torch.cuda.get_device_properties(index)
            yield Check("device", "ok", f"cuda:{index} {known.name}, {format_bytes(known.total_memory)}")
    elif torch.backends.mps.is_available():
        yield Check("device", "ok", "mps")
    else:
        why = (
            f"torch is built for CUDA {torch.version.cuda}, but sees no device"
            if torch.version.cuda
            else "no GPU build"
        )
        yield Check("device", "warn" if torch.version.cuda else "ok", f"cpu ({why})")


def _all_reduce() -> Iterator[Check]:
    """Check that the back ends work at all, with a group of only this process."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Check("all-reduce", "warn", "this torch has no torch.distributed: one process only")
        return
    for backend, device in (("gloo", "cpu"), ("nccl", "cuda")):
        if device == "cuda" and not torch.cuda.is_available():
            continue
        try:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            tensor = torch.ones(4, device=device)
            dist.all_reduce(tensor)
            right = bool((tensor == 1).all())
        except Exception as error:  # a back end that is missing, or can't find its network
            yield Check("all-reduce", "warn", f"{backend} does not work here: {describe(error)}")
            continue
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        yield Check("all-reduce", "ok" if right else "warn", f"{backend} works" if right else f"{backend} is wrong")


def _several(nproc: int) -> Iterator[Check]:
    """Check what processes compute together, and the speed of each."""
    from forge_train_tools.launching.once import launch_once

    with tempfile.TemporaryDirectory(prefix="forge-doctor-") as folder:
        arguments = {"folder": folder, "device": "auto", "slow": SLOW}
        for one in launch_once("forge_train_tools.health:worker", arguments, nproc)["findings"]:
            if one["name"] != "disk":  # of the temporary folder
                yield Check(f"{nproc} processes", one["status"], f"{one['name']}: {one['text']}")


def _disk(run_dir: Path) -> Iterator[Check]:
    """Check that a run folder can be made, and its free space."""
    there = run_dir.absolute()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"forge")
    except OSError as error:
        yield Check("disk", "fail", f"{run_dir}: can't be written: {error.strerror or error}")
        return
    free = shutil.disk_usage(there).free
    yield Check("disk", "ok" if free > ROOM else "warn", f"{run_dir}: {format_bytes(free)} free")


def _plugins() -> Iterator[Check]:
    """Import each plugin."""
    good = 0
    for found in discover():
        try:
            plugin = load(found)
        except (Exception, SystemExit) as error:
            text = str(error) if isinstance(error, ConfigError) else f"{found.label}: {describe(error)}"
            yield Check("plugin", "warn", text)
            continue
        lacking = {m: how for m, how in plugin.needs.items() if importlib.util.find_spec(m.partition(".")[0]) is None}
        for module, how in sorted(lacking.items()):
            yield Check("plugin", "warn", f"{found.label} needs {module!r}: {how}")
        good += not lacking
    yield Check("plugins", "ok", f"{good} can be imported")


def _commands() -> Iterator[Check]:
    from .app import COMMANDS

    for point in importlib.metadata.entry_points(group=GROUP):
        owner = point.dist.metadata["Name"] if point.dist else point.value
        if point.name in COMMANDS:
            yield Check("command", "warn", f"{point.name!r} of {owner} is hidden by forge's own command of that name")


def _start() -> Iterator[Check]:
    """Check that the preset's plugins and configuration are consistent."""
    from forge_train_tools.configuration.setup import resolve

    try:
        resolve(Request(config=PRESET))
    except ConfigError as error:
        yield Check("forge train", "fail", str(error))
        return
    yield Check("forge train", "ok", f"can start with the preset {PRESET}")

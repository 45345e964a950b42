"""Short trainings that show what only a device can: agreement with the CPU, graphs, resuming, waits, saves, offload."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
from torch import nn

from forge_train import Applied, Job, Phase, Plugin, StepResult, Transform, hookimpl
from forge_train_plugins.attention._packed.versions import missing as missing_flash
from forge_train_tools.testing import TinyRun, run_forge

from .case import LacksError, Row, Size

FORGE = [sys.executable, "-m", "forge_train_cli"]
LOGGED = 5
"""Steps from one logged one to the next, where waits are looked for."""


def small(size: Size, **more: Any) -> dict[str, Any]:
    """Values of a small model whose heads suit every kernel."""
    real = {"decoder.dim": 512, "decoder.heads": 8, "decoder.kv_heads": 4, "decoder.hidden": 1024}
    real |= {"train.sequence": 512, "decoder.max_sequence": 512}
    return {"run.device": size.device, **size.choose(real, {}), **more}


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="forge-gpu-") as path:
        yield Path(path)


def layout(size: Size, gpus: int, plugins: str, sets: tuple[str, ...]) -> list[Row]:
    """`forge verify --nproc N`: the same steps on one device and on several."""
    settings = ("decoder.layers=4", "decoder.heads=8", "decoder.kv_heads=4", f"run.device={size.device}", *sets)
    words = ["--nproc", str(gpus), *(word for one in settings for word in ("-s", one))]
    return verified(f"{plugins} on {gpus}", ["-p", f"synthetic,{plugins}", "--steps", "3", *words])


def verified(name: str, arguments: list[str]) -> list[Row]:
    """A row for each check of `forge verify`."""
    command = [*FORGE, "verify", "--json", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"{' '.join(command[2:])}: {done.stderr.strip()[-2000:]}") from None
    rows = [
        Row(f"{name}: {one['name']}", f"{one['worst']:.1e}", f"≤ {one['tolerance']:.1e}", one["ok"])
        for one in found["checks"]
    ]
    return [*rows, Row(f"{name}: exit code", str(done.returncode), "0", done.returncode == 0)]


def against_cpu(size: Size, precision: str, plugins: str = "", values: Mapping[str, Any] | None = None) -> list[Row]:
    """`forge verify --against run.device=cpu`: the same steps on the device and on the CPU."""
    own = {
        "decoder.dim": size.choose(128, 64),
        "decoder.layers": 2,
        "decoder.heads": 2,
        "decoder.kv_heads": 1,
        "decoder.hidden": size.choose(256, 96),
        "train.sequence": size.choose(128, 32),
        "train.global_batch": 4,
        "train.micro_batch": 2,
        "train.precision": precision,
        "run.device": size.device,
    }
    # On a CPU alone, another way to cut the same batch is what it is compared with.
    against = "run.device=cpu" if size.device == "cuda" else "train.micro_batch=1"
    sets = [word for key, value in (own | (values or {})).items() for word in ("-s", f"{key}={value}")]
    names = ",".join(("synthetic", *([plugins] if plugins else [])))
    name = f"{names.partition(',')[2] or 'dense'}{_base(values or {})} in {precision}, against {against}"
    return verified(name, ["-p", names, "--against", against, "--steps", "3", *sets])


def _base(values: Mapping[str, Any]) -> str:
    return f" on {values['lora.base']}" if "lora.base" in values else ""


class Graphs(Plugin):
    """Counts the graphs that were compiled."""

    api = (1, 0)
    graphs = 0

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        from torch._dynamo.utils import counters

        Graphs.graphs = counters["stats"]["unique_graphs"]


def compiled(size: Size, kernel: str, ac: bool) -> list[Row]:
    """A compiled run against an eager one: graphs are made, and the losses are the same.

    Raises:
        LacksError: if the kernel's package is not installed.
    """
    if kernel == "flash" and (why := missing_flash("auto")):
        raise LacksError(why)
    values = small(size, **{"train.precision": "bf16"})
    backend = size.choose({}, {"compile.backend": "aot_eager"})
    recompute = ["ac"] if ac else []
    with folder() as one, folder() as other:
        eager = run_forge([kernel, *recompute], values, folder=one)
        Graphs.graphs = 0
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()  # which count all graphs of the process
        found = run_forge([kernel, *recompute, "compile", Graphs], {**values, **backend}, folder=other)
    apart = max(abs(a - b) / abs(b) for a, b in zip(found.losses, eager.losses, strict=True))
    name = f"{kernel}{' and ac' * ac}, compiled"
    return [
        Row(f"{name}: graphs", str(Graphs.graphs), "> 0", Graphs.graphs > 0),
        Row(f"{name}: losses against eager ones", f"{apart:.1e}", "≤ 5.0e-03", apart <= 5e-3),
    ]


def resumed(size: Size, plugins: tuple[str, ...] = (), **values: Any) -> list[Row]:
    """A run that was stopped and resumed against one that was not: the same bits."""
    settings = small(size, **{"run.deterministic": True, "checkpoint.every": 2, **values})
    with folder() as one, folder() as other:
        whole = run_forge(plugins, settings, steps=6, name="r", folder=one)
        run_forge(plugins, settings, steps=6, name="r", stop_at=3, folder=other)
        again = run_forge(plugins, settings, steps=6, name="r", folder=other)
    same = whole.numbers == again.numbers and weights(whole) == weights(again)
    name = " ".join([*plugins, *(f"{key}={value}" for key, value in values.items())]) or "fp32"
    return [Row(f"stopped and resumed, {name}: metrics and weights", "equal" if same else "different", "equal", same)]


def weights(run: TinyRun) -> str:
    """A digest of all weights and of the optimizer's state."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in [*run.model.parameters(), *_tensors(run.optimizer.state_dict())]:
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else b"")
    return found.hexdigest()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


class NoWaits(Plugin):
    """Has torch refuse whatever waits for the device between logged steps."""

    api = (1, 0)
    watched = 0

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        watch = step.step >= LOGGED and step.step % LOGGED in (1, 2)  # the next step is not logged
        NoWaits.watched += watch
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error" if watch else "default")


def waits(size: Size, plugins: tuple[str, ...] = (), **values: Any) -> list[Row]:
    """Steps between logged ones under `set_sync_debug_mode("error")`."""
    settings = small(size, **{"train.precision": "bf16", "log.every": LOGGED, **values})
    NoWaits.watched = 0
    with folder() as one:
        run_forge([*plugins, NoWaits], settings, steps=3 * LOGGED, folder=one)
    name = f"steps without a wait, {' '.join(plugins) or 'dense'}"
    return [Row(name, str(NoWaits.watched), "4", NoWaits.watched == 4)]


def saves(size: Size) -> list[Row]:
    """Asynchronous checkpoints, whose tensors the next steps overwrite while they are written, against synchronous."""
    values = small(size, **{"checkpoint.every": 1, "checkpoint.keep": 9, "run.deterministic": True})
    with folder() as one, folder() as other:
        found = run_forge((), {**values, "checkpoint.asynchronous": True}, steps=6, folder=one)
        right = run_forge((), values, steps=6, folder=other)
        pairs = [
            (file.read_bytes(), (found.run / file.relative_to(right.run)).read_bytes())
            for file in sorted(right.run.glob("checkpoints/step-*/rank-*.safetensors"))
        ]
    same = sum(a == b for a, b in pairs)
    return [
        Row(
            "files of asynchronous checkpoints equal to synchronous ones",
            f"{same} of {len(pairs)}",
            "all",
            0 < same == len(pairs),
        )
    ]


class OneRank(Plugin):
    """Shards over one rank, with FSDP2 and its collectives, as `fsdp2` does over several."""

    api = (1, 0)
    provides = ("data_parallel",)
    layout = True
    offload = False

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        from torch.distributed.device_mesh import init_device_mesh

        from forge_train_plugins.parallel._fsdp2 import Sharding

        mesh = init_device_mesh(job.device.type, (1,), mesh_dim_names=("fsdp",))
        sharding = Sharding(job, mesh_of=lambda _: mesh, offload=OneRank.offload)

        def apply(part: nn.Module) -> Applied:
            return sharding.apply(part)

        return Transform(Phase.SHARD, "data_parallel", apply, covers=("dp_replicate", "dp_shard", "precision"))


def one_rank(size: Size, offload: bool) -> list[Row]:
    """FSDP2 over one rank of NCCL (gloo on a CPU) against a run without a process group."""
    import torch.distributed as dist

    values = small(size)
    with folder() as one, folder() as other:
        right = run_forge((), values, folder=one)
        backend = "cpu:gloo,cuda:nccl" if size.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        OneRank.offload = offload
        try:
            found = run_forge([OneRank], values, folder=other)
            total = torch.ones(3, device=size.device)
            dist.all_reduce(total)
        finally:
            dist.destroy_process_group()
    apart = max(abs(a - b) / abs(b) for a, b in zip(found.losses, right.losses, strict=True))
    name = f"one rank of {backend}{', offloaded' * offload}"
    return [
        Row(f"{name}: losses against no process group", f"{apart:.1e}", "≤ 1.0e-05", apart <= 1e-5),
        Row(f"{name}: all-reduce of ones", f"{float(total.sum()):g}", "3", float(total.sum()) == 3),
    ]


def peak(size: Size, plugins: tuple[str, ...] = (), **values: Any) -> list[Row]:
    """The device's peak memory against that of `forge plan`."""
    sets = {
        "decoder.vocabulary": 32768,
        "decoder.layers": 8,
        "train.precision": "bf16",
        "train.global_batch": 8,
        **values,
    }
    settings = small(size, **sets, **{"decoder.dim": 1024, "train.sequence": 1024, "decoder.max_sequence": 1024})
    names = ("synthetic", *plugins)
    settings |= {"train.micro_batch": 8, "train.steps": 3, "train.evaluate_every": 0, "checkpoint.every": 0}
    words = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    command = [*FORGE, "plan", "-p", ",".join(names), "--world", "1", "--json", *words]
    planned = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["memory"]["peak"]
    from forge_train.engine import train
    from forge_train_tools.configuration.request import Request
    from forge_train_tools.configuration.setup import resolve

    torch.cuda.reset_peak_memory_stats()
    with folder() as one:
        train(resolve(Request(plugins=names, set=tuple(words[1::2]))), run_dir=one, resume="never")
    ratio, name = torch.cuda.max_memory_allocated() / planned, f"{' '.join(plugins) or 'plain'}{_base(values)}"
    return [Row(f"peak memory / planned, {name}", f"{ratio:.3f}", "0.9 to 1.1", 0.9 <= ratio <= 1.1)]

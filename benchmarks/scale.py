"""A run's control plane at 1 to 10,240 ranks: files, bytes, messages, time and memory; written to results/scale.md.

    python benchmarks/scale.py                       everything, in about ten minutes, and the page
    python benchmarks/scale.py checkpoint 10240      one part, as JSON
    python benchmarks/scale.py start 64
    python benchmarks/scale.py control 512
    python benchmarks/scale.py page FILE             the page from such lines

Ranks are fake: threads for what they tell each other, and one process that does each rank's part in turn for what only
the main process sees. The code is that of a run. Each part runs in a process of its own, on one thread.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from forge_train import Metric
from forge_train.base.format import format_bytes
from forge_train.checkpoint.seal import ALONE, seal
from forge_train.compose.compose import compose
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train.plugin.inspection import Inspection
from forge_train.plugin.job import Job
from forge_train.run.run import Run
from forge_train.step.aggregate import Metrics
from forge_train.store.index import Placed, entries_of, read_index, write_index
from forge_train.store.manifest import INDEX, MANIFEST, inspect
from forge_train.store.save_plan import HEADER, choose
from forge_train.store.shards import Shard
from forge_train.store.tensor_files import file_of
from forge_train_plugins.resilience._watchdog.heart import Heart
from forge_train_plugins.resilience._watchdog.verdict import Heartbeat
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.launching import meeting
from forge_train_tools.planning.communication import Collective, Collectives
from forge_train_tools.planning.imagined import imagined

RESULT = Path(__file__).parent / "results" / "scale.md"
SIZES = {"checkpoint": (8, 64, 1024, 10240), "start": (8, 64, 1024, 10240), "control": (32, 64, 128, 256, 512)}
DIM, HIDDEN, LAYERS, VOCABULARY, KEYS = 8192, 28672, 80, 128256, 1024
"""Of Llama 3 70B."""
MODEL = {
    "decoder.dim": DIM,
    "decoder.hidden": HIDDEN,
    "decoder.layers": LAYERS,
    "decoder.vocabulary": VOCABULARY,
    "decoder.heads": 64,
    "decoder.kv_heads": 8,
    "decoder.qk_norm": "false",
    "decoder.max_sequence": 8192,
    "train.sequence": 8192,
    "train.precision": "bf16",
}


# -- a checkpoint -----------------------------------------------------------------------------------------------------


def layout_of(world: int) -> Layout:
    """The layout that a world of some size has here."""
    if world < 64:
        return Layout(dp_shard=world)
    if world < 1024:
        return Layout(tp=8, dp_shard=world // 8)
    return Layout(pp=8, tp=8, cp=4, dp_shard=world // 256)


def tensors_of(layout: Layout) -> Iterator[tuple[str, tuple[int, ...], int | None, int]]:
    """Name, shape, dimension that tp cuts, and stage of every parameter and its two averages."""
    matrices: dict[str, tuple[tuple[int, ...], int | None]] = {
        "attention.q": ((DIM, DIM), 0),
        "attention.k": ((KEYS, DIM), 0),
        "attention.v": ((KEYS, DIM), 0),
        "attention.o": ((DIM, DIM), 1),
        "feed_forward.gate": ((HIDDEN, DIM), 0),
        "feed_forward.up": ((HIDDEN, DIM), 0),
        "feed_forward.down": ((DIM, HIDDEN), 1),
        "attention_norm": ((DIM,), None),
        "feed_forward_norm": ((DIM,), None),
    }
    ends = [("embedding", (VOCABULARY, DIM), 0, 0), ("norm", (DIM,), None, -1), ("head", (VOCABULARY, DIM), 0, -1)]
    inner = [
        (f"layers.{layer}.{name}", shape, cut, layer * layout.pp // LAYERS)
        for layer in range(LAYERS)
        for name, (shape, cut) in matrices.items()
    ]
    for name, shape, cut, stage in [*ends, *inner]:
        for kind in ("model.{}.weight", "optimizer.state.{}.weight.exp_avg", "optimizer.state.{}.weight.exp_avg_sq"):
            yield kind.format(name), shape, cut, stage % layout.pp


def shards_of(
    layout: Layout, rank: int, tensors: Sequence[tuple[str, tuple[int, ...], int | None, int]]
) -> list[Shard]:
    """The shards that a rank holds of its stage's tensors, cut by tp, and then by rows over dp_shard × cp."""
    rest, tp = divmod(rank, layout.tp)
    shard = rest % (layout.dp_shard * layout.cp)
    return [
        Shard(name, box, shape, torch.float32)
        for name, shape, cut, _ in tensors
        if (box := _box(shape, cut, tp, layout.tp, shard, layout.dp_shard * layout.cp)) is not None
    ]


def _box(shape: tuple[int, ...], cut: int | None, tp: int, tps: int, shard: int, shards: int) -> Any:
    box = [(0, size) for size in shape]
    if cut is not None:
        box[cut] = _chunk(*box[cut], tp, tps)
    box[0] = _chunk(*box[0], shard, shards)
    return tuple(box) if box[0][0] < box[0][1] else None


def _chunk(low: int, high: int, at: int, count: int) -> tuple[int, int]:
    """As torch.chunk cuts."""
    size = math.ceil((high - low) / count)
    return min(low + at * size, high), min(low + (at + 1) * size, high)


@dataclass
class AllRanks(DistributedContext):
    """The main process of a world whose other ranks are asked in turn."""

    ask: Callable[[int], Any] = lambda rank: None
    told: int = 0
    """Bytes of the others' answers, pickled."""

    def barrier(self) -> None:
        pass

    def gather_objects(self, value: Any, axis: str = "") -> list[Any]:
        return [value]

    def on_main(self, function: Callable[[], Any]) -> Any:
        return function()

    def through_main(self, value: Any, function: Callable[[list[Any]], Sequence[Any]]) -> Any:
        everybody = []
        for rank in range(self.world):
            sent = pickle.dumps(self.ask(rank))
            self.told += len(sent)
            everybody.append(pickle.loads(sent))  # objects of its own, as those that come from another process
        self.results = function(everybody)
        return self.results[0]


def checkpoint(world: int) -> dict[str, float]:
    """Choose, index, seal and read the checkpoint of a 70B model and AdamW's state, without a byte of a tensor."""
    layout = layout_of(world)
    tensors = list(tensors_of(layout))
    ranks = AllRanks(layout, torch.device("cpu"), World(size=world, local_size=8))
    by_stage = [[one for one in tensors if one[3] == stage] for stage in range(layout.pp)]
    ranks.ask = lambda rank: shards_of(layout, rank, by_stage[rank * layout.pp // world])
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(1, get_context("spawn")) as other:
        other.submit(int).result()  # it begins with the peak of this process, so before there is one
        folder = Path(name) / "step-00000001"
        folder.mkdir()
        began = time.process_time()
        shards = choose({}, ranks)
        chosen = time.process_time() - began
        placed, hashes = [], {}
        for rank, mine in enumerate(ranks.results):
            end = 0
            for shard in mine[0]:
                placed.append((shard.name, Placed(shard.box, file_of(rank, 0), HEADER + end)))
                end += shard.bytes
            if mine[0]:
                with (folder / file_of(rank, 0)).open("wb") as file:
                    file.truncate(HEADER + end)  # a file of zeros that takes no room
                hashes[file_of(rank, 0)] = f"{rank:032x}"
        count = len(placed)
        ranks.results, entries = [], entries_of(shards.plan.tensors, placed)
        del placed
        (folder / "state.json").write_text("{}")
        began = time.process_time()
        write_index(folder, entries)
        del entries
        seal(folder, 1, ALONE, known=hashes)
        written = time.process_time() - began
        read, tensors, memory = other.submit(resume, folder).result()
        return {
            "files": len(list(folder.iterdir())),
            "shards": count,
            "told": ranks.told,
            "index": (folder / INDEX).stat().st_size,
            "manifest": (folder / MANIFEST).stat().st_size,
            "choose": chosen,
            "write": written,
            "read": read,
            "tensors": tensors,
            "memory": max(memory, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        }


def resume(folder: Path) -> tuple[float, int, int]:
    """Read a checkpoint's manifest and index as a new run does; CPU seconds, tensors, and the most bytes of memory."""
    began = time.process_time()
    sealed = inspect(folder)
    if isinstance(sealed, str):
        raise RuntimeError(sealed)
    index = read_index(folder)
    return (
        time.process_time() - began,
        len(index),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def files_of_run(world: int, checkpoints: int) -> int:
    """Files of a finished run: its own eight, a log of each rank, and of each checkpoint five and one of each rank.

    A rank that holds more than 64 MiB, and has cores to spare, writes several; one that others' copies stand for writes
    none. A tokenizer's files come on top, in the run and in each checkpoint.
    """
    return 8 + world + checkpoints * (5 + world)


# -- the meeting of all ranks -----------------------------------------------------------------------------------------


class Counted:
    """A rank's client of a store, which counts what the rank says and hears."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.messages = 0
        self.stored = 0
        """Bytes of keys and values that were set, and of values that were read and had changed."""
        self.largest = 0
        """Bytes of the largest value that this rank alone is told."""
        self._read: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._count(len(key) + len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        changed = self._read.get(key) != value
        self._read[key] = value
        self._count(len(key) + len(value) if changed else 0)
        self.largest = max(self.largest, len(value))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        changed = [
            len(key) + len(value) for key, value in zip(keys, values, strict=True) if self._read.get(key) != value
        ]
        self._read.update(zip(keys, values, strict=True))
        self._count(sum(changed))
        return values

    def check(self, keys: list[str]) -> bool:
        self._count(0)
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._count(sum(map(len, keys)))
        self._store.wait(keys, timeout)

    def _count(self, size: int) -> None:
        self.messages += 1
        self.stored += size


@dataclass
class Met:
    """What a meeting took."""

    prefixes: list[str]
    messages: int
    stored: int
    largest: int
    seconds: float


@contextmanager
def served(world: int) -> Iterator[Any]:
    """A store as torchrun's agent has it."""
    yield dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def met(world: int, store: Any = None, late: float = 0.0) -> Met:
    """Let ranks meet in a store, each in a thread with a connection of its own; `late` seconds for the last one."""
    with nullcontext(store) if store is not None else served(world) as there:
        clients = [dist.TCPStore("localhost", there.port, is_master=False) for _ in range(world)]
        counted = [Counted(client) for client in clients]
        prefixes = [""] * world
        limit = timedelta(seconds=120)

        def meet(rank: int) -> None:
            if late and rank == world - 1:
                time.sleep(late)
            place = World(rank=rank, size=world, local_size=world)
            prefixes[rank] = meeting._agree(place, counted[rank], limit, "here")  # type: ignore[arg-type]
            inner = Counted(dist.PrefixStore(prefixes[rank], clients[rank]))
            meeting._await_all(place, inner, limit, "here")  # type: ignore[arg-type]
            counted[rank].messages += inner.messages
            counted[rank].stored += inner.stored

        began = time.perf_counter()
        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
    told = max(one.largest for one in counted)
    return Met(prefixes, sum(one.messages for one in counted), sum(one.stored for one in counted), told, seconds)


# -- the control plane ------------------------------------------------------------------------------------------------


def control(world: int) -> dict[str, float]:
    """Let ranks meet, give heartbeats, stall together, and add up metrics: what all of them do, added up."""
    found = met(world)
    beats, entries, reads = heartbeats(world)
    calls, size = metrics(world)
    return {
        "messages": found.messages,
        "stored": found.stored,
        "met": found.seconds,
        "files": entries,
        "beats": beats,
        "reads": reads,
        "reduced": calls * world,
        "reduced_bytes": size * world,
    }


def heartbeats(world: int) -> tuple[int, int, int]:
    """Bytes of all heartbeats, files, and files that all ranks read until each knows who speaks in a stall."""
    reads = [0]
    original = Heartbeat.read

    def read(folder: Path, rank: int) -> Heartbeat | None:
        reads[0] += 1
        return original(folder, rank)

    with tempfile.TemporaryDirectory() as name, patch.object(Heartbeat, "read", read):
        run, layout, hearts = Run(Path(name)), Layout(dp_shard=world), []
        for rank in range(world):
            context = DistributedContext(layout, torch.device("cpu"), World(rank=rank, size=world, local_size=8))
            job: Any = SimpleNamespace(dist=context, run=run, hooks=SimpleNamespace(inside=()))
            hearts.append(Heart(job, 1e-3, 1e-3))
            hearts[-1]._folder.mkdir(parents=True, exist_ok=True)
            hearts[-1]._beat(1.0, stalled=True)
        for one in hearts:
            if one._lower(1.0, "") is None:
                one._hear(1.0, "")
        files = [file for file in Path(name).rglob("*") if file.is_file()]
        return sum(file.stat().st_size for file in files), len(files), reads[0]


class Sum(Metric):
    """A number that is added up."""

    def __init__(self) -> None:
        super().__init__(1)

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        return float(sums)


def metrics(world: int) -> tuple[int, int]:
    """Collectives of a rank for a line of metrics, and their bytes."""
    seen: list[Collective] = []
    layout = Layout(dp_shard=world)
    with imagined(layout, World(size=world, local_size=8)) as context:
        some = {f"m{number}": Sum() for number in range(20)}
        job: Any = SimpleNamespace(
            dist=context, device=torch.device("cpu"), hooks=SimpleNamespace(inspection=Inspection())
        )
        made = Metrics(job, some)
        for one in some.values():
            one.sums += 1.0
        with Collectives(seen.append):
            made.take()
    return len(seen), sum(one.held for one in seen)


# -- the start --------------------------------------------------------------------------------------------------------


def start(world: int) -> dict[str, float]:
    """Set up the first rank of a world: its configuration, its process groups, and its composition."""
    layout = layout_of(world)
    axes = {"pp": layout.pp, "tp": layout.tp, "cp": layout.cp}
    plugins = tuple(axis for axis, size in axes.items() if size > 1)
    sets = [f"parallel.{axis}={size}" for axis, size in axes.items()]
    sets += [f"train.global_batch={16 * layout.dp_shard}", "train.micro_batch=1", "train.steps=10"]
    sets += [f"{key}={value}" for key, value in MODEL.items()]
    sets += ["cp.method=gather"] if layout.cp > 1 else []
    began = time.process_time()
    setup = resolve(Request(plugins=plugins, set=tuple(sets)), world=world, data=False)
    resolved, began = time.process_time() - began, time.process_time()
    place = World(size=world, local_size=min(world, 8))
    given: list[list[Any]] = []
    for rank in range(0, world, world // layout.pp) if layout.pp > 1 else ():
        with imagined(layout, World(rank=rank, size=world, local_size=place.local_size)) as context:
            compose(Job.of(setup.config, setup.hooks, Run(Path("none")), context), allocate=False)
            given.append(context.given)
    began = time.process_time()
    with imagined(layout, place, given) as context:
        meshes, began = time.process_time() - began, time.process_time()
        said = [0, 0]
        gather = context.gather_objects

        def counted(value: Any, axis: str = "") -> Any:
            size = dist.get_world_size(context._group(axis))
            said[0] += 1
            said[1] += len(pickle.dumps(value)) * size
            return gather(value, axis)

        context.gather_objects = counted  # type: ignore[method-assign]
        compose(Job.of(setup.config, setup.hooks, Run(Path("none")), context), allocate=False)
        composed = time.process_time() - began
    return {"resolve": resolved, "meshes": meshes, "compose": composed, "gathers": said[0], "received": said[1]}


# -- the page ---------------------------------------------------------------------------------------------------------

COLUMNS = {
    "start": ("resolve", "meshes", "compose", "gathers", "received", "memory"),
    "control": ("messages", "stored", "met", "files", "beats", "reads", "reduced", "reduced_bytes"),
    "checkpoint": ("shards", "files", "told", "index", "manifest", "choose", "write", "read", "memory"),
}
HEADS = {
    "start": "One rank starts: CPU seconds for configuration, process groups and composition; gathers, and the bytes "
    "it is given in them",
    "control": "All ranks together: messages and bytes through the store until all have met, and seconds; heartbeat "
    "files and bytes, and files read until all know who speaks in a stall; sums for a line of 20 metrics, their bytes",
    "checkpoint": "The main process at a save and a resume: shards and files; bytes it is told; bytes of index and "
    "manifest; CPU seconds to choose who writes what (with the fake ranks' work), to write both, and to read both",
}
SECONDS, BYTES = {"resolve", "meshes", "compose", "met", "choose", "write", "read"}, {
    "received", "memory", "stored", "beats", "reduced_bytes", "told", "index", "manifest",
}  # fmt: skip


def measured() -> Iterator[dict[str, Any]]:
    """Every part at every size, each in a process of its own."""
    for part, sizes in SIZES.items():
        for world in sizes:
            command = [sys.executable, __file__, part, str(world)]
            ended = subprocess.run(
                command, stdout=subprocess.PIPE, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            yield json.loads(ended.stdout)


def page(found: Sequence[dict[str, Any]]) -> str:
    """The results, a table for each part."""
    lines = [
        "# Scale",
        "",
        "Written by `python benchmarks/scale.py`, with fake ranks on one core. See [Scale](../../docs/scale.md).",
        "",
    ]
    for part, columns in COLUMNS.items():
        rows = sorted((one for one in found if one["part"] == part), key=lambda one: int(one["world"]))
        lines += [f"## {part.capitalize()}", "", f"{HEADS[part]}.", ""]
        lines += [f"| ranks | {' | '.join(columns)} |", f"|{'---:|' * (len(columns) + 1)}"]
        for one in rows:
            lines.append(f"| {one['world']:,} | {' | '.join(_shown(name, one[name]) for name in columns)} |")
        lines.append("")
    return "\n".join(lines)


def _shown(name: str, value: float) -> str:
    if name in SECONDS:
        return f"{value:.2f} s"
    return format_bytes(int(value)) if name in BYTES else f"{int(value):,}"


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["page"]:
        text = Path(arguments[1]).read_text(encoding="utf-8")
        RESULT.write_text(
            page([json.loads(line) for line in text.splitlines() if line.startswith("{")]), encoding="utf-8"
        )
    elif arguments:
        made = globals()[arguments[0]](int(arguments[1]))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"part": arguments[0], "world": int(arguments[1]), "memory": memory, **made}))
    else:
        RESULT.write_text(page(list(measured())), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

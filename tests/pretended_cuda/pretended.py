"""A CUDA device that is not there, on a torch for CPUs alone. Import it before torch.

Its tensors lie in the host's memory and hold real values, which the CPU's kernels compute. A mix of devices raises, as
CUDA's kernels do. `take()` gives what would have made the host wait for a device, each with the line that did it.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if "torch" in sys.modules:
    raise ImportError("import the pretended device before torch")
ctypes.CDLL(os.environ["PRETENDED_CUDA"], mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed  # noqa: E402
from torch import Tensor  # noqa: E402

ROOT = f"{Path(__file__).resolve().parents[2]}/"
OWN = ("core/", "plugins/", "contrib/", "cli/")
phase = ""
"""What is going on, for notes."""
_notes: collections.Counter[tuple[str, str, str, str]] = collections.Counter()


def take() -> dict[tuple[str, str, str, str], int]:
    """(Phase, kind, operation, the line of Forge nearest to it) → how often, since the last call."""
    found = dict(_notes)
    _notes.clear()
    return found


def note(kind: str, operation: str) -> None:
    frame: Any = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and name.removeprefix(ROOT).startswith(OWN):
            _notes[phase, kind, operation, f"{name.removeprefix(ROOT)}:{frame.f_lineno}"] += 1
            return
        frame = frame.f_back
    _notes[phase, kind, operation, "torch"] += 1


_library = torch.library.Library("pretended_cuda", "IMPL")
_library.impl("note", note, "CompositeExplicitAutograd")


class Stream:
    """There is one, and everything on it is done at once."""

    device_type, stream_id, device_index, cuda_stream = "cuda", 0, 0, 0

    def __init__(self, device: Any = None, priority: int = 0, **more: Any) -> None:
        self.device, self.priority = torch.device("cuda", 0), priority

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        note("stream", "Stream.synchronize")

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 1

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """Takes the host's time."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note("stream", "Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return (other.time - self.time) * 1e3


class Context:
    """`torch.cuda.stream` and `torch.cuda.device`: nothing to switch to."""

    def __init__(self, given: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class Properties:
    """Of an H100."""

    name, total_memory, major, minor, multi_processor_count = "NVIDIA H100 80GB HBM3", 80 * 2**30, 9, 0, 132
    uuid, warp_size, regs_per_multiprocessor, max_threads_per_multi_processor = "0", 32, 65536, 2048
    gcnArchName, shared_memory_per_block_optin, L2_cache_size = "", 232448, 52428800  # noqa: N815


def _seed(seed: int) -> None:
    torch.ops.pretended_cuda.seed(int(seed))


def _pretend() -> None:
    operations, stream = torch.ops.pretended_cuda, Stream()
    constants: dict[str, Any] = {
        "is_available": True, "device_count": 8, "current_device": 0, "set_device": None, "is_initialized": True,
        "_lazy_init": None, "init": None, "_is_compiled": True, "current_stream": stream, "default_stream": stream,
        "set_stream": None, "get_device_name": Properties.name, "get_device_capability": (9, 0),
        "get_device_properties": Properties(), "memory_allocated": 0, "max_memory_allocated": 1 << 20,
        "memory_reserved": 0, "max_memory_reserved": 0, "reset_peak_memory_stats": None, "empty_cache": None,
        "mem_get_info": (70 * 2**30, 80 * 2**30), "memory_stats": collections.defaultdict(int),
        "_is_in_bad_fork": False, "is_bf16_supported": True, "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, value in constants.items():
        setattr(torch.cuda, name, lambda *given, _value=value, **more: _value)
    functions: dict[str, Any] = {
        "Stream": Stream, "Event": Event, "stream": Context, "StreamContext": Context, "device": Context,
        "device_of": Context, "_DeviceGuard": Context, "manual_seed": _seed, "manual_seed_all": _seed,
        "synchronize": lambda device=None: note("device", "torch.cuda.synchronize"),
        "get_rng_state": lambda device="cuda": operations.rng_state(),
        "set_rng_state": lambda state, device="cuda": operations.set_rng_state(state),
        "get_rng_state_all": lambda: [operations.rng_state()],
        "set_rng_state_all": lambda states: operations.set_rng_state(states[0]),
    }  # fmt: skip
    for name, value in functions.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.manual_seed_all = _seed
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *given: None
    Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]

    def manual_seed(seed: int) -> torch.Generator:
        _seed(seed)
        return torch.random.default_generator.manual_seed(int(seed))

    torch.manual_seed = torch.random.manual_seed = manual_seed
    torch.backends.cuda.can_use_flash_attention = lambda *given, **more: False
    torch.version.cuda = "13.0"
    raw: dict[str, Any] = {"_cuda_getCurrentRawStream": 0, "_cuda_getDeviceCount": 8, "_cuda_getDevice": 0}
    raw["_cuda_getCurrentStream"] = (0, 0, 1)
    for name, value in raw.items():
        if not hasattr(torch._C, name):
            setattr(torch._C, name, lambda *given, _value=value: _value)


def join() -> None:
    """Have gloo carry what NCCL would: its kernels for a device are those of the host."""
    import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param

    begin = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *given: Any, **more: Any) -> Any:
        made = begin("cpu:gloo,cuda:gloo" if backend and "nccl" in backend else backend, *given, **more)
        torch.ops.pretended_cuda.hook_c10d()
        return made

    torch.distributed.init_process_group = init_process_group
    _record_collectives()
    torch.distributed.is_nccl_available = lambda: True
    fsdp_param.free_storage = fsdp_param.alloc_storage = lambda tensor: None


def _record_collectives() -> None:
    """As NCCL's flight recorder does: how long each collective takes, here the waiting for it."""
    entries: list[dict[str, Any]] = []
    wait = torch.distributed.Work.wait

    def timed(work: Any, *given: Any) -> Any:
        created, began = time.time_ns(), time.perf_counter()
        try:
            return wait(work, *given)
        finally:
            took = (time.perf_counter() - began) * 1e3
            entries.append({"time_created_ns": created, "duration_ms": took, "retired": True})

    torch.distributed.Work.wait = timed
    torch._C._distributed_c10d._dump_nccl_trace_json = lambda: json.dumps({"entries": entries})


_pretend()

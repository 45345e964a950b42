"""The ranks of `testing.Pool`: `python -m forge_train_tools.testing.worker`, started by the pool alone.

One process imports torch and forks a rank whenever the pool asks for one, which is then there at once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

PR_SET_PDEATHSIG = 1
PATIENCE = timedelta(days=1)
"""For a collective: the pool ends ranks that hang, and knows whether they only wait for a core."""
IMPORTED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed._tools", "torch.distributed.tensor.debug"),
    *("pydantic.dataclasses", "pydantic.type_adapter", "tomlkit", "forge_train.engine"),
    *("forge_train_kit.data.plugin", "forge_train_kit.data.items", "forge_train_kit.data.loader"),
    *("forge_train_kit.data.tokenizers.added", "forge_train_kit.model", "forge_train_kit.optim"),
    *("forge_train_tools.configuration.setup", "forge_train_tools.saver", "forge_train_tools.testing.runs"),
    "forge_train_tools.verification.record",
)
"""Modules that ranks need, imported once for all."""
FORKS = sys.platform == "linux"
"""Elsewhere the system's own libraries do not bear it."""


def main() -> None:
    """Be the process that starts ranks, or one of them."""
    given = json.loads(os.environ.pop("FORGE_POOL"))
    _die_with(given["parent"])
    rank = given if "rank" in given else _start_ranks(socket.socket(fileno=given["control"]))
    if rank:
        _serve(**rank)


def _start_ranks(control: socket.socket) -> dict[str, Any] | None:
    """Do what the pool asks for until it is gone; in a rank that was forked, what `_serve` is to be given."""
    if FORKS:
        for name in IMPORTED:
            importlib.import_module(name)
        gc.freeze()  # half a million objects, which no collection has to look at again
    while (got := socket.recv_fds(control, 4096, 3))[0]:
        asked, files = json.loads(got[0]), got[1]
        if "wait" in asked:
            process, status = os.waitpid(asked["wait"], 0 if asked["block"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if process else None
        else:
            rank = {**asked, "replies": files[1], "parent": os.getpid()}
            answer = os.fork() if FORKS else _spawned(rank, files)
            if answer == 0:
                control.close()
                for place, file in enumerate((files[0], files[2], files[2])):
                    os.dup2(file, place)
                _die_with(rank["parent"])
                return rank
            for file in files:
                os.close(file)
        control.sendall(json.dumps(answer).encode())
    return None


def _spawned(rank: dict[str, Any], files: list[int]) -> int:
    environment = os.environ | {"FORGE_POOL": json.dumps(rank)}
    command, (requests, replies, output) = [sys.executable, "-m", __spec__.name], files
    return subprocess.Popen(
        command, stdin=requests, stdout=output, stderr=output, pass_fds=(replies,), env=environment
    ).pid


def _serve(rank: int, port: int, replies: int, parent: int) -> None:
    """Run the cases that come in on stdin, one a line, until it is closed."""
    faulthandler.enable()
    import torch
    from torch.distributed import TCPStore

    from . import hanging
    from .joined import share_device

    hanging.answer_signal()
    share_device()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = TCPStore("127.0.0.1", port, is_master=False)
    with os.fdopen(replies, "w", encoding="utf-8") as out, os.fdopen(0, encoding="utf-8") as requests:
        for line in requests:
            _answer(out, json.loads(line), store, rank)


def _answer(replies: IO[str], request: dict[str, Any], store: Store, rank: int) -> None:
    from . import joined

    failed = False
    try:
        value = _run(request, store, rank)
        text = json.dumps({"value": value, "kept": joined.here()})
    except BaseException:  # whatever a case does is its own failure, not the worker's
        text = json.dumps({"error": traceback.format_exc()})
        failed = True
    if failed:
        gc.collect()  # the traceback is gone: now connections close, and ranks that wait for this one fail at once
    sys.stdout.flush()
    sys.stderr.flush()
    replies.write(text + "\n")
    replies.flush()


def _run(request: dict[str, Any], store: Store, rank: int) -> Any:
    """Call the case in its process group."""
    import torch

    from . import joined

    sys.path[:] = request["path"]
    world = request["world"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]))  # nobody joins there: see below
    torch.manual_seed(0)
    joined.join(request["group"], store, rank, world, PATIENCE)
    keep = False
    try:
        module, _, name = request["case"].partition(":")
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        value = function(**request["arguments"])
        keep = request["keep"]
        return value
    finally:
        if not keep or joined.crowded():
            joined.leave()


def _die_with(parent: int) -> None:
    """End when the pool's process ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        raise SystemExit(1)


if __name__ == "__main__":
    main()

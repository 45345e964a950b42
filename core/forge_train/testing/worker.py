"""One rank of `forge_train.testing.Pool`: `python -m forge_train.testing.worker`, started by the pool alone."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the cases that come in on stdin, one a line, until it is closed."""
    pool = json.loads(os.environ.pop("FORGE_POOL"))
    _die_with(pool["parent"])
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = TCPStore("127.0.0.1", pool["port"], is_master=False)
    with os.fdopen(pool["replies"], "w", encoding="utf-8") as replies:
        for line in sys.stdin:
            _answer(replies, json.loads(line), store, pool["rank"])


def _answer(replies: IO[str], request: dict[str, Any], store: Store, rank: int) -> None:
    try:
        reply = {"value": _run(request, store, rank)}
        text = json.dumps(reply)
    except BaseException:  # whatever a case does is its own failure, not the worker's
        text = json.dumps({"error": traceback.format_exc()})
    sys.stdout.flush()
    sys.stderr.flush()
    replies.write(text + "\n")
    replies.flush()


def _run(request: dict[str, Any], store: Store, rank: int) -> Any:
    """Call the case in a process group of its own."""
    import torch
    import torch.distributed as dist

    from ..processes.process_group import leave

    sys.path[:] = request["path"]
    world = request["world"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]))  # nobody joins there: see below
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"case-{request['number']}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=2 * request["timeout"]),  # the pool's own comes first, and says where ranks stand
    )
    try:
        module, _, name = request["case"].partition(":")
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        return function(**request["arguments"])
    finally:
        # Closes the connections too: ranks that wait for one that failed fail at once.
        leave()


def _die_with(parent: int) -> None:
    """End when the pool's process ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        raise SystemExit(1)


if __name__ == "__main__":
    main()

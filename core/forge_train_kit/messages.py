"""Messages from one rank to another."""

from __future__ import annotations

from typing import Any


def wait_for_message(work: Any, group: Any) -> None:
    """Wait until a message from one rank to another has gone, or come.

    gloo (torch 2.13) would wait as long as the group was told when it was made: `DistributedContext.settle` changes
    that for collectives alone.
    """
    import torch
    import torch.distributed as dist

    if dist.get_backend(group) == "gloo":
        work.wait(group._get_backend(torch.device("cpu")).options._timeout)
    else:
        work.wait()

"""How the processes that a launcher started find each other."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import CommunicationError
from .world import World


def join(place: World, device: torch.device, timeout: timedelta) -> None:
    """Make the process group.

    Raises:
        CommunicationError: if a process does not come, or rank 0 can't listen.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not agent_has_store
    at = f"{place.address}:{place.port}"
    try:
        store = dist.TCPStore(
            place.address, place.port, place.size, is_master=serves, timeout=timeout, wait_for_workers=False
        )
        # A prefix of its own for each attempt: after a restart gloo finds the addresses of the dead otherwise.
        own = dist.PrefixStore(f"attempt-{place.attempt}", store)
        _await_all(place, own, timeout, at)
        dist.init_process_group(backend, store=own, rank=place.rank, world_size=place.size, timeout=timeout)
    except RuntimeError as error:
        if serves and "EADDRINUSE" in str(error):
            raise CommunicationError(
                f"Rank 0 can't listen at {at}: the port is in use. Set MASTER_PORT to a free one, on all nodes."
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise CommunicationError(
            f"Rank {place.rank} can't join the other {place.size - 1} at {at}: {reason}"
        ) from error


def _await_all(place: World, store: dist.Store, timeout: timedelta, at: str) -> None:
    """Have rank 0 name those that do not come; the others hear of it from whoever started them."""
    store.set(f"here-{place.rank}", "")
    if place.rank:
        return
    try:
        store.wait([f"here-{rank}" for rank in range(place.size)], timeout)
    except RuntimeError as error:
        missing = [rank for rank in range(place.size) if not store.check([f"here-{rank}"])]
        ranks = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
        raise CommunicationError(
            f"After {timeout.total_seconds():g} s {ranks} not joined the other {place.size - len(missing)} of "
            f"{place.size} processes at {at}. Look whether they were started, and at their logs."
        ) from error

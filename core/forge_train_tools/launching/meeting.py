"""The processes of a run find each other; those that do not come are named."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from forge_train.base.errors import CommunicationError
from forge_train.mesh.world import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

LONGEST_TRY = 5.0
"""Seconds that one attempt to connect may take: packets may vanish without a word."""


def meet(place: World, device: torch.device, timeout: timedelta) -> None:
    """Make the process group.

    Raises:
        CommunicationError: if a process does not come, or rank 0 can't listen.
    """
    import torch.distributed as dist

    from forge_train.mesh.process_group import backend_of

    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not agent_has_store
    at = f"{place.address}:{place.port}"
    if not serves:
        _reach(place, timeout, at)
    try:
        store = dist.TCPStore(
            place.address, place.port, place.size, is_master=serves, timeout=timeout, wait_for_workers=False
        )
        # In a store that outlives them, gloo would find the addresses of the dead after a restart.
        own = dist.PrefixStore(_agree(place, store, timeout, at), store) if agent_has_store else store
        _await_all(place, own, timeout, at)
        dist.init_process_group(backend_of(device), store=own, rank=place.rank, world_size=place.size, timeout=timeout)
    except RuntimeError as error:
        if serves and "EADDRINUSE" in str(error):
            raise CommunicationError(
                f"Rank 0 can't listen at {at}: the port is in use. Set MASTER_PORT to a free one, on all nodes."
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise CommunicationError(
            f"Rank {place.rank} can't join the other {place.size - 1} at {at}: {reason}"
        ) from error


def _reach(place: World, timeout: timedelta, at: str) -> None:
    """Wait until the store listens: torch's own waiting writes a page of C++ frames at each try."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.1)
            socket.create_connection((place.address, place.port), timeout=min(left, LONGEST_TRY)).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"Rank {place.rank} on {socket.gethostname()} can't reach {at} within "
                    f"{timeout.total_seconds():g} s: {error.strerror or error}. Look whether rank 0 was started there, "
                    "and at the network between both."
                ) from error
        time.sleep(random.uniform(0.05, 0.5))  # ten thousand ranks do not knock at once


def _await_all(place: World, store: dist.Store, timeout: timedelta, at: str) -> None:
    """Have rank 0 name those that do not come; the others hear of it from whoever started them."""
    store.set(f"here-{place.rank}", "")
    if place.rank:
        return
    try:
        store.wait([f"here-{rank}" for rank in range(place.size)], timeout)
    except RuntimeError as error:
        missing = [rank for rank in range(place.size) if not store.check([f"here-{rank}"])]
        raise _absent(missing, place, timeout, at) from error


def _absent(missing: list[int], place: World, timeout: timedelta, at: str) -> CommunicationError:
    ranks = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
    return CommunicationError(
        f"After {timeout.total_seconds():g} s {ranks} not joined the other {place.size - len(missing)} of "
        f"{place.size} processes at {at}. Look whether they were started, and at their logs."
    )


def _agree(place: World, store: dist.Store, timeout: timedelta, at: str) -> str:
    """A prefix that the processes of this start share, and no other ones.

    Agents of torchrun count their restarts each for itself, so one that joined later has another count, and the store
    stays when their number changes. So every process draws a name, and rank 0 answers each with that name and a prefix,
    anew if one of the names is another now, until all have taken the same prefix. The processes of an earlier start
    find no answer to a name of theirs. Each process but rank 0 reads what is meant for it alone: the bytes that go
    through the store grow with the number of processes, and not with its square.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    ranks = range(place.size)
    names, answers = ([f"{kind}-{rank}" for rank in ranks] for kind in ("name", "answer"))
    awaited, answered, prefix = names, [b""], ""
    store.set(names[place.rank], mine)
    while time.monotonic() < deadline:
        if place.rank == 0 and store.check(names) and (drawn := store.multi_get(names)) != answered:
            own = hashlib.sha256(b",".join(drawn)).hexdigest()
            for answer, name in zip(answers, drawn, strict=True):
                store.set(answer, f"{name.decode()},{own}")
            answered = drawn
        mark = answers[place.rank]
        for_me, _, found = store.get(mark).decode().partition(",") if store.check([mark]) else ("", "", "")
        if for_me == mine and found != prefix:
            prefix, awaited = found, [f"{found}-{rank}" for rank in ranks]
            store.set(awaited[place.rank], "")
        if prefix and place.rank == 0 and store.check(awaited):
            store.set(f"{prefix}-all", "")
        if prefix and store.check([f"{prefix}-all"]):
            return prefix
        time.sleep(0.05)
    raise _absent([rank for rank in ranks if not store.check([awaited[rank]])] or [0], place, timeout, at)

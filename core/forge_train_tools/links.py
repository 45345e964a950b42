"""Links between the machines of a run: how long each takes for the same bytes, and which are slow."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Sequence
from statistics import median

import torch
import torch.distributed as torch_dist

from forge_train.mesh.distributed import DistributedContext

from .health import Finding, stopwatch

SENT = 4 << 20
"""Bytes that each link takes."""
Edge = tuple[int, int]
"""The ranks that send and receive."""


class Links:
    """Times links at each check, and compares them with each other and with the checks before.

    Args:
        slow: a link is slow if it takes so many times what is usual.
    """

    def __init__(self, slow: float) -> None:
        self._slow, self._usual = slow, math.inf

    def look(self, dist: DistributedContext) -> list[Finding]:
        """Time all links; every rank calls this, and gets the same. Nothing is timed on a single machine."""
        hosts = dist.gather_objects(socket.gethostname())
        mine: dict[Edge, float] = {}
        for edges in ring(hosts):
            edge = next((edge for edge in edges if dist.rank in edge), None)
            seconds = timed(dist, edge)
            if edge and dist.rank == edge[1]:
                mine[edge] = seconds
        everybody = dist.gather_objects(mine) if len(set(hosts)) > 1 else []
        return list(self.compare(hosts, {edge: taken for found in everybody for edge, taken in found.items()}))

    def compare(self, hosts: Sequence[str], seconds: dict[Edge, float]) -> Iterator[Finding]:
        """Yield a warning for each slow link, by the hosts of all ranks and the seconds that each took."""
        if not seconds:
            return
        now = median(seconds.values())
        self._usual, before = min(now, self._usual), self._usual
        than = "all links" if now <= before else "all links in an earlier check"
        for (sender, receiver), taken in sorted(seconds.items()):
            if taken > self._slow * self._usual:
                where = f"{hosts[sender]} to {hosts[receiver]} (rank {sender} to {receiver})"
                rate, times = SENT / taken / 1e6, taken / self._usual
                yield Finding(
                    "link", "warn", f"{where}: {rate:.1f} MB/s, {times:.1f} × slower than the median of {than}"
                )
        rates = [SENT / taken / 1e6 for taken in seconds.values()]
        yield Finding("link", "ok", f"{min(rates):.1f} to {max(rates):.1f} MB/s on {len(rates)} links between machines")


def ring(hosts: Sequence[str]) -> list[list[Edge]]:
    """The links from each machine to the next, between ranks of the same place on both, in rounds in which no rank has
    two; none on a single machine."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    machines = list(ranks.values())
    if len(machines) == 1:
        return []
    rounds: list[list[Edge]] = [[], [], []]
    for at, here in enumerate(machines):
        last = at == len(machines) - 1
        rounds[2 if last and at % 2 == 0 else at % 2] += zip(here, machines[0 if last else at + 1], strict=False)
    return [edges for edges in rounds if edges]


def timed(dist: DistributedContext, edge: Edge | None) -> float:
    """Seconds that a rank of an edge takes, once both have met, the better of two; all ranks call this."""
    seconds = []
    for size in (1, SENT, SENT):  # the first makes the connection
        data = torch.zeros(size, dtype=torch.uint8, device=dist.device)
        dist.barrier()
        if edge is None:
            continue
        do, peer = (torch_dist.isend, edge[1]) if dist.rank == edge[0] else (torch_dist.irecv, edge[0])
        elapsed = stopwatch(dist.device)
        for work in torch_dist.batch_isend_irecv([torch_dist.P2POp(do, data, peer, dist.group)]):
            work.wait()
        seconds.append(elapsed())
    return min(seconds[1:], default=0.0)

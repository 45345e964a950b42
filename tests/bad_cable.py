"""A cable that takes long and loses packets, where the kernel has no netem: a process passes on what arrives.

python -m bad_cable PORT PORT SECONDS LOSS
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import random
import select
import socket
import struct
import sys
import time
from itertools import count

ETH_P_ALL, PACKET_OUTGOING = 3, 4
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17


def whole_packets(port: str) -> None:
    """Have packets leave a port as they would leave a real card: with their checksums, and no longer than a frame."""
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP", port.encode(), ctypes.addressof(value)))


def pass_on(names: list[str], seconds: float, loss: float) -> None:
    """Pass frames on between two ports, until stdin ends."""
    ports = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) for _ in names]
    for port, name in zip(ports, names, strict=True):
        port.bind((name, 0))
    other = {ports[0]: ports[1], ports[1]: ports[0]}
    drawn, number, under_way = random.Random(0), count(), list[tuple[float, int, socket.socket, bytes]]()
    print("passes on", flush=True)
    while True:
        patience = max(under_way[0][0] - time.monotonic(), 0) if under_way else None
        ready, _, _ = select.select([*ports, sys.stdin], [], [], patience)
        if sys.stdin in ready:
            return
        for port in ready:
            frame, (_, _, kind, *_) = port.recvfrom(1 << 16)
            if kind != PACKET_OUTGOING and drawn.random() >= loss:
                heapq.heappush(under_way, (time.monotonic() + seconds, next(number), other[port], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, port, frame = heapq.heappop(under_way)
            port.send(frame)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        whole_packets(sys.argv[1])
    else:
        pass_on(sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4]))

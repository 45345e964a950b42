"""Random numbers of generation: each is a function of a seed, a request and a position, and of nothing before it."""

from __future__ import annotations

import hashlib
import struct


def uniform(seed: int, request: int, sample: int, position: int) -> float:
    """A number from 0 up to 1, with 53 bits.

    Args:
        seed: of the user.
        request: number of the request.
        sample: number of its sample.
        position: place of the token in the sequence, the prompt's tokens included.
    """
    digest = hashlib.blake2b(struct.pack("<4Q", seed, request, sample, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53

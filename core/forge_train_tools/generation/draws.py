"""Random numbers of generation: each is a function of a seed, a request and a position, and of nothing before it."""

from __future__ import annotations

import hashlib
import struct


def uniform(seed: int, *place: int) -> float:
    """A number from 0 up to 1, with 53 bits.

    Args:
        seed: of the user.
        place: numbers of what is drawn: of the request, of its sample, and of the token in the sequence, the prompt's
            included.
    """
    digest = hashlib.blake2b(struct.pack(f"<{1 + len(place)}Q", seed, *place), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53

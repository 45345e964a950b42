"""A shuffle that is a pure function of (seed, epoch, index): nothing is stored, so resuming costs nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 5
_U64 = np.uint64


def permute(index: NDArray[np.int64], epoch: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Return the image of `index` under the permutation of 0…n-1 given by (seed, epoch); elementwise, `[k]` → `[k]`.

    Rounds of keyed xor, odd multiplication modulo 2^b and xor-shift, each a bijection of b-bit numbers, where b is the
    number of bits of n-1; a result ≥ n is permuted again until it is below n (cycle walking: Black & Rogaway 2002,
    "Ciphers with arbitrary finite domains"), which keeps the bijection and takes fewer than two passes on average.
    """
    bits = max(1, (n - 1).bit_length())
    one = len(epoch) > 0 and bool((epoch == epoch[0]).all())
    keys = _keys(epoch[:1] if one else epoch, seed)
    value = _mix(index.astype(_U64), keys, bits)
    todo = np.flatnonzero(value >= _U64(n))
    while len(todo):
        again = _mix(value[todo], keys if one else keys[:, todo], bits)
        value[todo] = again
        todo = todo[again >= _U64(n)]
    return value.view(np.int64)


def _mix(value: NDArray[np.uint64], keys: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    mask, shift = _U64((1 << bits) - 1), _U64((bits + 1) // 2)
    for key in keys:
        value = value ^ (key >> _U64(32))
        value &= mask
        value *= key | _U64(1)
        value &= mask
        value ^= value >> shift
    return value


def _keys(epoch: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """`[rounds, k]` independent 64-bit keys: splitmix64 (Steele et al. 2014) of seed, epoch and round."""
    start = scramble(scramble(np.full(1, seed % 2**64, _U64)) + epoch.astype(_U64))
    rounds = np.arange(1, _ROUNDS + 1, dtype=_U64)[:, None]
    return scramble(start[None, :] + rounds)


def scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's mixing, elementwise: a bijection whose results look independent."""
    x = x * _U64(0x9E3779B97F4A7C15) + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))

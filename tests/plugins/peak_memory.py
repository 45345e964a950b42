"""The most memory that tensors take at once on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import profile


def peak_memory(function: Callable[[], object]) -> int:
    """Bytes that torch's CPU allocator had given out at once, at most, beyond those at the start."""
    with profile(profile_memory=True) as recorded:
        function()
    results: Any = recorded.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    return int(max(accumulate(size for _, size in changes)))

"""Check of a run's attention kernel against what its plugins will ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..contract.attention import KernelCapabilities
from ..plugin.job import Hooks
from .discovery import discover

SLOT = "attention_kernel"


def able(asked: Iterable[KernelCapabilities]) -> list[str]:
    """The installed kernels that can do all of this, by name."""
    wanted = list(asked)
    return sorted(
        found.name
        for found in discover()
        if (kernel := found.kernel_capabilities) and not any(True for one in wanted for _ in kernel.lacks(one))
    )


def misfits(hooks: Hooks, asked: Iterable[tuple[str, KernelCapabilities]]) -> Iterator[str]:
    """A sentence for everything that is asked for and that the kernel lacks.

    Args:
        hooks: of the run.
        asked: who asks, in words, and for what.
    """
    if (name := hooks.provider(SLOT)) is None:
        return
    kernel = hooks.enabled[name]
    for who, wanted in asked:
        if lacking := list(kernel.cls.kernel_capabilities.lacks(wanted)):
            others = able([wanted])
            way_out = (
                f"Installed kernels that have it: {', '.join(others)}; enable one with --plugins."
                if others
                else "No installed kernel has."
            )
            yield f"Plugin {kernel.ref.label} computes attention without {' and '.join(lacking)}; {who}. {way_out}"

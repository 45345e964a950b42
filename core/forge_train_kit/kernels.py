"""The attention kernel of a run, checked against what plugins, layers and the device ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

from forge_train.base.errors import ConfigError
from forge_train.config import Config
from forge_train.plugin.job import Hooks, Job
from forge_train.registry.discovery import discover
from forge_train_kit.capabilities import KernelCapabilities, capabilities_of

from .hookspecs import attention_kernel, kernel_needs
from .layers import AttentionKernel
from .source import Source

_ASKED: WeakKeyDictionary[Hooks, list[KernelCapabilities]] = WeakKeyDictionary()
"""Needs that the layers of each run's model stated with `kernel_with`."""


def kernel_with(needs: KernelCapabilities, job: Job) -> AttentionKernel:
    """Return the run's attention kernel, for a layer that needs more of it than plugins announce.

    Raises:
        ConfigError: if it lacks something of `needs`; names the kernels that have it.
    """
    if lacking := [*_misfits(job.hooks, [("A layer asks for it.", needs)])]:
        raise ConfigError("\n".join(lacking))
    _ASKED.setdefault(job.hooks, []).append(needs)
    return attention_kernel(job)


def asked_by_layers(hooks: Hooks) -> list[KernelCapabilities]:
    """Return what the layers of a run's model have asked for so far."""
    return _ASKED.get(hooks, [])


def needs_of(hooks: Hooks, config: Config) -> list[tuple[str, KernelCapabilities]]:
    """Return each plugin's needs of the attention kernel, after a sentence that names the plugin; without the data's if
    no data is read."""
    idle = hooks.provider("build_data") if hooks.opened else None
    answers = hooks.call(kernel_needs, {"config": config})
    return [(f"Plugin {name!r} asks for it.", needs) for name, needs in answers if name != idle]


def able(asked: Iterable[KernelCapabilities], device: str = "") -> list[str]:
    """The installed kernels that can do all of this, by name; those that run on a type of device, if one is given."""
    wanted = list(asked)
    kernels = [(found.name, source, source.kernel_capabilities) for found in discover() for source in [Source(found)]]
    return sorted(
        name
        for name, source, kernel in kernels
        if kernel and not any(True for one in wanted for _ in kernel.lacks(one))
        if not device or device in (source.devices or (device,))
    )


def suits(hooks: Hooks, config: Config) -> Iterator[str]:
    """Yield a sentence for everything that plugins ask of the attention kernel and that it lacks."""
    return _misfits(hooks, needs_of(hooks, config))


def _misfits(hooks: Hooks, asked: Iterable[tuple[str, KernelCapabilities]]) -> Iterator[str]:
    if (name := hooks.provider(attention_kernel.name)) is None:
        return
    kernel = hooks.enabled[name]
    for reason, wanted in asked:
        if lacking := list(capabilities_of(kernel.cls).lacks(wanted)):
            others = able([wanted])
            way_out = (
                f"Installed kernels that have it: {', '.join(others)}; enable one with --plugins."
                if others
                else "No installed kernel has."
            )
            yield f"Plugin {kernel.ref.label} computes attention without {' and '.join(lacking)}. {reason} {way_out}"

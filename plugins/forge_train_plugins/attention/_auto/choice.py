"""The kernel that passes each call to the chosen one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch import Tensor

from forge_train import ConfigError, Job
from forge_train.registry.discovery import load
from forge_train_kit.capabilities import KernelCapabilities, capabilities_of
from forge_train_kit.kernels import asked_by_layers, needs_of
from forge_train_kit.layers import AttentionKernel, AttentionOptions
from forge_train_kit.plugins import find


class Choice:
    """Causal grouped-query attention; see `AttentionKernel`.

    Args:
        names: of kernels, in order of preference.
        job: of the run.

    Raises:
        ConfigError: if none of them can do what the run needs.
    """

    def __init__(self, names: tuple[str, ...], job: Job) -> None:
        self._job = job
        self.needs = KernelCapabilities()
        self.kernels: dict[str, AttentionKernel] = {}
        """The kernels that run on this device, in order of preference."""
        self.refused: dict[str, str] = {}
        self._capabilities: dict[str, KernelCapabilities] = {}
        for name in names:
            cls = load(find(name))
            if cls.devices and job.device.type not in cls.devices:
                self.refused[name] = f"it runs on {', '.join(cls.devices)} only"
                continue
            try:
                kernel: Any = cls(cls.Config())
                self.kernels[name] = kernel.attention_kernel(job)
                self._capabilities[name] = capabilities_of(cls)
            except (ConfigError, ImportError) as error:
                self.refused[name] = str(error)
        self.taken = self.able()[0]
        self._by_asked: dict[frozenset[str], AttentionKernel] = {}

    def able(self) -> list[str]:
        """Kernels that can do everything that plugins and layers have asked for so far.

        Raises:
            ConfigError: if there is none.
        """
        job = self._job
        asked = [needs for _, needs in needs_of(job.hooks, job.config)]
        self.needs = union([*asked, *asked_by_layers(job.hooks)])
        if found := [name for name, one in self._capabilities.items() if not [*one.lacks(self.needs)]]:
            return found
        reasons = [f"{name}: {', '.join(one.lacks(self.needs))}" for name, one in self._capabilities.items()]
        reasons += [f"{name}: {why}" for name, why in self.refused.items()]
        raise ConfigError(f"auto.kernels: none of them can do what the run needs. Missing: {'; '.join(reasons)}")

    def take(self, name: str) -> None:
        """Pass calls to this kernel from now on.

        Raises:
            ConfigError: if it does not run on this rank.
        """
        if name not in self.kernels:
            raise ConfigError(f"auto: rank 0 chose the kernel {name!r}, which does not run here: {self.refused[name]}")
        self.taken = name
        self._by_asked.clear()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
        return self._kernel(frozenset(options.needs(query, key)))(query, key, value, options)

    def _kernel(self, needed: frozenset[str]) -> AttentionKernel:
        if needed not in self._by_asked:
            flags: dict[str, Any] = dict.fromkeys(needed, True)
            wanted = KernelCapabilities(**flags)
            names = [self.taken, *(name for name in self.kernels if name != self.taken)]
            able = [name for name in names if not [*self._capabilities[name].lacks(wanted)]]
            if not able:
                raise ConfigError(f"auto.kernels: none of {', '.join(names)} has {' and '.join(sorted(needed))}.")
            self._by_asked[needed] = self.kernels[able[0]]
        return self._by_asked[needed]


def union(asked: Iterable[KernelCapabilities]) -> KernelCapabilities:
    """The union of all that they ask for."""
    found: dict[str, Any] = {}
    for needs in asked:
        for one in fields(needs):
            value = getattr(needs, one.name)
            before = found.get(one.name, type(value)())
            found[one.name] = before or value if isinstance(value, bool) else tuple(sorted({*before, *value}))
    return KernelCapabilities(**found)

"""A plugin's transforms on two processes against one: `forge verify` on every axis that they cover."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from forge_train.base.errors import describe
from forge_train.contract.transform import Phase
from forge_train.loop.describe import to_toml
from forge_train.mesh.layout import Layout
from forge_train.plugin.calls import EnabledPlugin
from forge_train.registry.discovery import plugin_name
from forge_train_kit.axes import of_distribution

from ..configuration.request import Request
from ..verification import Verdict
from .bench import Bench
from .conformance import BrokenError, Check, SkippedError, attempt
from .environment import LOCAL, really_installed
from .verifying import Verifier

AXES: dict[str, tuple[Phase | None, Layout]] = {
    "dp_shard": (Phase.SHARD, Layout(dp_shard=2)),
    "dp_replicate": (Phase.SHARD, Layout(dp_replicate=2)),
    "tp": (Phase.TENSOR, Layout(tp=2)),
    "cp": (Phase.CONTEXT, Layout(cp=2)),
    "ep": (Phase.EXPERT, Layout(dp_shard=2, ep=2)),
    "pp": (Phase.PIPELINE, Layout(pp=2)),
}
"""Axis → the phase whose transforms split along it (others only say that they get along), and two processes of it. The
phase does not matter where the plugin's package adds the axis."""
RANKS = 2
STEPS = 3


def agree(bench: Bench, folder: Path, verify: Verifier) -> Iterator[Check]:
    """A check for each axis that the plugin covers; for a plugin that covers none, one with data parallelism."""
    layouts, covered = AXES | _own_axes(bench.enabled), list[str]()
    for axis, (phase, layout) in layouts.items():
        try:
            transforms = bench.transforms(layout)
        except Exception as error:  # it asks for meshes, say, which only processes have
            yield Check(_name(axis), "skip", f"`parallelize` does not say what it covers: {describe(error)}")
        else:
            covered += [axis] * any(phase in (one.phase, None) and axis in one.covers for one in transforms)
    for axis in covered or ["dp_shard"]:
        yield attempt(_name(axis), partial(_agrees, bench, axis, layouts[axis][1], folder, verify))


def _own_axes(enabled: EnabledPlugin) -> dict[str, tuple[Phase | None, Layout]]:
    owner = enabled.ref.distribution
    return {axis.name: (None, Layout(others=((axis, RANKS),))) for axis in of_distribution(owner)}


def _name(axis: str) -> str:
    return f"agrees with one process ({axis} = 2)"


def _agrees(bench: Bench, axis: str, layout: Layout, folder: Path, verify: Verifier) -> str:
    strangers = [one for one in bench.setup.hooks.enabled.values() if one.ref.module.startswith(LOCAL)]
    if strangers:
        raise SkippedError(f"{strangers[0].ref.name} is defined in a test, out of reach for other processes")
    _check_devices(bench.enabled)
    file = folder / f"{axis}.toml"
    file.write_text(_for_others(bench), encoding="utf-8")
    verdict = verify(Request(str(file), set=("train.micro_batch=1", *layout.settings())), RANKS, steps=STEPS)
    if verdict.undecided:
        raise SkippedError(" ".join(verdict.advice))
    if not verdict.agree:
        raise BrokenError(_told(verdict))
    return ", ".join(f"{check.name} {check.worst:.1e}" for check in verdict.checks if check.tolerance)


def _check_devices(enabled: EnabledPlugin) -> None:
    """Check that each process can have its own device."""
    if not enabled.cls.devices or "cpu" in enabled.cls.devices:
        return
    import torch

    if (count := torch.cuda.device_count()) < RANKS:
        raise SkippedError(f"it runs on {', '.join(enabled.cls.devices)} only: needs {RANKS} devices, there is {count}")


def _for_others(bench: Bench) -> str:
    """The configuration for processes that find only what is really installed: the rest by its dotted name."""
    import tomlkit

    config, hooks = bench.setup.config, bench.setup.hooks
    document = tomlkit.parse(to_toml(config, hooks))
    real = really_installed()
    found = [(name, hooks.enabled[plugin_name(name)].ref) for name in config.plugins]
    document["plugins"] = [name if one in real else one.object for name, one in found]
    return tomlkit.dumps(document)


def _told(verdict: Verdict) -> str:
    wrong = [f"{check.name} {check.worst:.2g} > {check.tolerance:.2g}" for check in verdict.checks if not check.ok]
    return " ".join([f"{', '.join(wrong)}.", *verdict.advice])

"""The frozen configuration of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .schema import Volatile, mark
from .sections import CORE_SECTIONS, CheckpointSection, LogSection, ParallelSection, RunSection, TrainSection
from .tree import DEFAULT, Key, Origin
from .validate import plain

__all__ = ["Config", "Origin"]

LENGTHS = ("steps", "tokens", "epochs")
"""Keys of [train] that give the length of a run."""
MAY_DIFFER = frozenset({"run.device", "train.micro_batch", "train.init_from", *(f"train.{key}" for key in LENGTHS)})
"""Keys that may differ between a checkpoint and the run that resumes it: the device and the layout change nothing
beyond rounding, and a run may be made longer."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every value of a run, validated. Core's sections are attributes; plugins' are in `sections`."""

    run: RunSection = field(default_factory=RunSection)
    train: TrainSection = field(default_factory=TrainSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Plugin name → its section, for every enabled plugin."""
    plugins: tuple[str, ...] = ()
    """Specs of the plugins that were asked for (not those that defaults bring), sorted."""
    without: tuple[str, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Slot → the plugin that fills it unless another enabled one does; only those in use."""
    neutral: frozenset[str] = frozenset()
    """Enabled plugins that change no number beyond rounding: observers, and those that only lay tensors out."""
    as_written: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values that were filled in from others, as they stand in the file: another layout fills in others."""
    source: str = ""
    """Name of the configuration: that of a preset, or a file's stem."""
    origins: Mapping[Key, Origin] = field(default_factory=dict)
    base: Mapping[Key, Any] = field(default_factory=dict)
    """Plugins and defaults beneath every configuration; see `Tree.base`."""

    def everything(self) -> dict[str, Any]:
        """All sections, core's first, by name."""
        core = {name: getattr(self, name) for name in CORE_SECTIONS}
        return {**core, **dict(sorted(self.sections.items()))}

    def origin(self, key: Key) -> Origin:
        return self.origins.get(key, DEFAULT)

    def values(self, *, volatile: bool = True) -> dict[str, Any]:
        """`section.key` → JSON value; nested tables stay one value. Without the volatile ones on demand."""
        return {
            f"{name}.{key}": value
            for name, section in self.everything().items()
            if volatile or name not in self.neutral
            for key, value in plain(section).items()
            if volatile or not is_volatile(type(section), key)
        }

    def enabled(self) -> tuple[str, ...]:
        """Names of all enabled plugins, sorted."""
        return tuple(sorted(self.sections))


def is_volatile(section: type, key: str) -> bool:
    """Return True if a field is marked as having no effect on the numbers."""
    return mark(section, (key,), Volatile) is not None


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys whose values differ between two `Config.values`, with both; None where one side has no such key."""
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)

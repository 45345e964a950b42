"""The modalities of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError

from . import hookspecs

if TYPE_CHECKING:
    from forge_train import Job

    from .modalities import Modality


def enabled_modalities(job: Job) -> dict[str, Modality]:
    """Name → modality, of all enabled plugins, in their order; those that share another's encoder come last.

    Raises:
        ConfigError: if two plugins give one name or one placeholder, or one lacks the encoder that it shares.
    """
    found: dict[str, Modality] = {}
    owners: dict[str, str] = {}
    for plugin, given in hookspecs.modalities(job):
        for modality in given:
            for word in (modality.name, modality.placeholder):
                if word in owners:
                    raise ConfigError(f"Plugins {owners[word]!r} and {plugin!r} both give a modality {word!r}.")
                owners[word] = plugin
            found[modality.name] = modality
    last = {name for name, one in found.items() if getattr(one, "encoded_by", "")}
    return {name: _joined(found[name], found, owners[name]) for name in sorted(found, key=last.__contains__)}


def _joined(modality: Any, found: Mapping[str, Modality], plugin: str) -> Modality:
    """The modality, after it has seen the one whose encoder it shares."""
    name = getattr(modality, "encoded_by", "")
    if not name:
        given: Modality = modality
        return given
    if name not in found:
        raise ConfigError(
            f"Plugin {plugin!r}: the encoder of modality {name!r} is to encode {modality.name!r} too, and no enabled "
            "plugin gives it."
        )
    if getattr(found[name], "encoded_by", ""):
        raise ConfigError(f"Plugin {plugin!r}: modality {name!r} has no encoder of its own to share.")
    joined: Modality = modality.joined(found[name])
    return joined

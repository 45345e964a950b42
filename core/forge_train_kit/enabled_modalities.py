"""The modalities of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train import ConfigError

from . import hookspecs

if TYPE_CHECKING:
    from forge_train import Job

    from .modalities import Modality


def enabled_modalities(job: Job) -> dict[str, Modality]:
    """Name → modality, of all enabled plugins, in the order of plugins.

    Raises:
        ConfigError: if two plugins give one name or one placeholder.
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
    return found

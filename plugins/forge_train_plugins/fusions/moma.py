"""Routers and experts by modality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from forge_train import Plugin, hookimpl, section

from ..experts.hookspecs import ExpertGroups

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.modalities import Fusion, FusionSpec


class ModalityAwareExperts(Plugin):
    """Routers and experts of `moe` for each modality, text among them (arXiv:2407.21770).

    Feature vectors stand among the tokens, as with `prefix`. The balancing loss, loads, capacities and biases of `moe`
    are those of each group of experts; attention and dense blocks are shared. The paper's experts choose their tokens;
    here tokens choose, so that the model can generate text. Text meets text's experts alone.
    """

    api = (1, 0)
    requires = ("moe",)

    @section
    class Config:
        experts: Mapping[str, int] = field(default_factory=dict)
        """Modality → how many of `moe.experts` are its own; text has the others. By default each has equally many."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._kinds: Any = None

    @hookimpl
    def expert_groups(self, experts: int, job: Job) -> ExpertGroups:
        from forge_train_kit.enabled_modalities import enabled_modalities

        from ._moma import Groups, group_of_experts

        names = tuple(enabled_modalities(job))
        return Groups(group_of_experts(experts, names, self.config.experts), self._kinds_of(names, job))

    @hookimpl
    def fusion(self, spec: FusionSpec, job: Job) -> Fusion:
        from forge_train_kit.model import InSequence

        return InSequence(spec, self._kinds_of(tuple(spec.encoders), job))

    def _kinds_of(self, names: tuple[str, ...], job: Job) -> Any:
        """One for all layers."""
        from forge_train_kit.model import Kinds

        if self._kinds is None:
            self._kinds = Kinds(names, job.step)
        return self._kinds

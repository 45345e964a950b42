"""Conversion of a part to low precision, and its checks while training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_train import Applied, ConfigError, DivergedError
from forge_train.base.errors import nearest
from forge_train.base.format import format_list
from forge_train_kit.specialisation import Specialisation

from .layers import Candidate, NarrowLinear, Product, Rule, candidates, taken
from .products import Recipe

if TYPE_CHECKING:
    from forge_train import Job, StepResult

log = logging.getLogger("forge_train")

Decline = Callable[[Sequence[Candidate]], dict[str, str]]
"""Modules that are not worth it, each with the reason."""


@dataclass
class Conversion:
    """One run's modules that multiply in low precision.

    Args:
        own: name of the plugin.
        job: the run.
        rules: which modules.
        linear: recipe of linear layers.
        experts: recipe of experts.
        says: what the note begins with.
        decline: see `Decline`.
        experimental: whether to say so in the log too.
    """

    own: str
    job: Job
    rules: Sequence[Rule]
    linear: Recipe
    experts: Recipe
    says: str
    decline: Decline = lambda _: {}
    experimental: bool = False
    products: dict[str, Product] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)
    _narrow: Specialisation = field(default_factory=lambda: Specialisation(lambda own: NarrowLinear))
    _first: Tensor | None = None

    def apply(self, part: nn.Module) -> Applied:
        """Have the modules of a part that the rules name multiply in low precision.

        Raises:
            ConfigError: for a pattern that matches nothing, or if no module can.
        """
        found = candidates(part)
        self._names += [one.name for one in found]
        if self.job.dist.layout.pp == 1:
            self._expect_matches([self._names])
        wanted = [one for one in found if taken(self.rules, one.name)]
        unfit = {one.name: reason for one in wanted if (reason := one.unfit())}
        fit = [one for one in wanted if one.name not in unfit]
        for rule in self.rules:
            if rule.given and rule.take and rule.pattern in unfit:
                raise ConfigError(
                    f"{rule.key}: {rule.pattern!r} can't multiply in low precision: {unfit[rule.pattern]}."
                )
        if unfit and not fit:
            raise ConfigError(f"{self.own}: no module can multiply in low precision.{_listed(unfit)}")
        if unfit:
            log.warning("%s leaves %d of %d modules as they are.%s", self.own, len(unfit), len(wanted), _listed(unfit))
        declined = self.decline(fit)
        self.declined |= declined
        for one in fit:
            if one.name not in declined:
                self.products[one.name] = one.multiply_with(self.experts if one.experts else self.linear, self._narrow)
        return Applied(part, tuple(one.name for one in fit), self._note(found, fit, unfit, declined))

    def begin(self) -> None:
        """The run begins: patterns are judged over all stages of a pipeline, and scales are looked at.

        Raises:
            ConfigError: for a pattern that matches nothing.
        """
        if self.job.dist.layout.pp > 1:
            self._expect_matches(self.job.dist.gather_objects(self._names))
        if self.experimental and self.job.dist.main:
            log.warning("%s: %s", self.own, self.says)
        for product in self.products.values():
            product.broken = torch.zeros((), dtype=torch.bool, device=self.job.device)

    def step(self, step: StepResult) -> None:
        """Look, at steps that are logged, whether scales were finite.

        Raises:
            DivergedError: naming the modules, on every rank.
        """
        if flags := [product.broken for product in self.products.values() if product.broken is not None]:
            if not step.skipped:
                self._remember(torch.stack(flags))
            torch._foreach_zero_(flags)
        if step.step % self.job.config.log.every == 0 or step.step == self.job.steps:
            self._check(step)

    def _remember(self, broken: Tensor) -> None:
        """Remember the modules of the first step in which any broke; from the next step on all are broken."""
        self._first = broken if self._first is None else torch.where(self._first.any(), self._first, broken)

    def _check(self, step: StepResult) -> None:
        none = torch.zeros(len(self.products) or 1, dtype=torch.bool, device=self.job.device)
        broken = none if self._first is None else self._first
        if not self.job.dist.all_reduce(broken.any().int(), "max").item():
            return
        mine = [name for name, flag in zip(self.products, broken.tolist(), strict=False) if flag]
        names = list(dict.fromkeys(name for some in self.job.dist.gather_objects(mine) for name in some))
        raise DivergedError(
            f"{self.own}: by step {step.step} a scale of {format_list(map(repr, names))} was not finite: its "
            f"input or its weight was not. Try a lower learning rate, or leave it in high precision with {self.own}."
            f"{self.rules[-1].key.partition('.')[2]}."
        )

    def _expect_matches(self, everybody: Sequence[Sequence[str]]) -> None:
        names = [name for some in everybody for name in some]
        for rule in self.rules:
            if rule.given and not any(rule.matches(name) for name in names):
                raise ConfigError(
                    f"{rule.key}: {rule.pattern!r} matches none of the {len(names)} modules that could multiply in low "
                    f"precision, like {names[0]!r}.{nearest(rule.pattern, names)}"
                    if names
                    else f"{self.own}: the model has no linear layer, and no experts, to multiply in low precision."
                )

    def _note(
        self, found: Sequence[Candidate], fit: Sequence[Candidate], unfit: dict[str, str], declined: dict[str, str]
    ) -> str:
        linears = sum(not one.experts and one.name not in declined for one in fit)
        experts = sum(one.experts and one.name not in declined for one in fit)
        kept = [one.name for one in found if one not in fit]
        parts = [f"{self.says}: {linears} linear" + (f", {experts} groups of experts" if experts else "")]
        if kept:
            parts.append(f"as they are: {format_list(kept)}" + (f" ({len(unfit)} for their shape)" if unfit else ""))
        if declined:
            parts.append(f"declined {len(declined)} of {len(fit)}: {next(iter(declined.values()))}")
        return "; ".join(parts)


def _listed(reasons: dict[str, str]) -> str:
    return "\n  " + format_list((f"{name}: {reason}" for name, reason in reasons.items()), 6, "\n  ")

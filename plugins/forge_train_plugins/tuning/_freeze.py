"""The parameters that `freeze` takes, and when it gives them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from forge_train import Applied, ConfigError, MicroBatch
from forge_train.base.errors import nearest
from forge_train.base.format import format_list
from forge_train_kit.data.progress import tell

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Model

    from .freeze import Freeze


class Names:
    """The parameters of one run, by name."""

    def __init__(self, config: Freeze.Config, job: Job) -> None:
        self.config, self.job = config, job
        self.done = 0
        """Steps that were done."""
        self._all: list[list[str]] = []
        """The names of each parameter, the first one first."""
        self._frozen: dict[str, int] = {}
        """First name of a frozen parameter → the entry of `thaw` that matches it, or −1."""
        self._held: list[list[nn.Parameter]] = []
        """The parameters of each entry."""
        self._are_frozen: list[bool] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._sizes: list[int] = []
        """Elements of each entry's parameters, and of those that are trained from the start; of all stages."""

    def apply(self, part: nn.Module) -> Applied:
        """Freeze what matches in a part of the model. Of a tied tensor, any name may match.

        What thaws later is left as it is: the optimizer takes what has gradients when it is made.

        Raises:
            ConfigError: as `_check` does.
        """
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in part.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        thawing = 0
        frozen = []
        for parameter, own in names.items():
            every = [*own, *_elsewhere(part, own)]
            self._all.append(every)
            if not _matches(every, self.config.parameters) or _matches(every, self.config.but):
                continue
            frozen.append(own[0])
            self._frozen[own[0]] = entry = self._entry(every)
            thawing += entry >= 0
            if entry < 0:
                parameter.requires_grad_(False)
            for module, _, key in (name.rpartition(".") for name in own if entry >= 0):
                owner: Any = part.get_submodule(module)
                owner.trained_at_first = {**getattr(owner, "trained_at_first", {}), key: 0}
        if self.job.dist.layout.stages == 1:
            self._check([(self._all, [*self._frozen])])
        note = f"{len(frozen)} of {len(names)} parameters" + (f", {thawing} of which thaw" if thawing else "")
        return Applied(part, tuple(frozen), note, on_micro_batch=self._follow)

    def start(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """The run begins: the parameters have their memory, and all stages of a pipeline are known.

        Raises:
            ConfigError: as `_check` does.
        """
        parameters = dict(model.named_parameters())
        copies = {own[0] for own in self._all if own[0] not in parameters}
        follow = {name: self._frozen.pop(name) for name in copies if name in self._frozen}
        self._all = [own for own in self._all if own[0] not in copies]
        self._held = [[] for _ in self.config.thaw]
        trained = 0
        for own in self._all:
            entry = self._frozen.get(own[0])
            if entry is None:
                trained += parameters[own[0]].numel()
            elif entry >= 0:
                self._held[entry].append(parameters[own[0]])
        self._are_frozen = [False] * len(self._held)
        self._optimizer = optimizer
        sizes = [*(sum(one.numel() for one in held) for held in self._held), trained]
        stages = self.job.dist.gather_stages((self._all, [*self._frozen], sizes))
        self._check([(names, frozen) for names, frozen, _ in stages])
        self._sizes = [sum(of_stage) for of_stage in zip(*(sizes for *_, sizes in stages), strict=True)]
        for part in model.parts if follow else ():
            for name, copy in part.named_parameters():
                if name in follow and not any(_elsewhere(part, [name])):
                    copy.requires_grad_(True)  # nobody says of what: that may be trained, and needs its gradients
                elif follow.get(name, -1) >= 0:
                    self._held[follow[name]].append(copy)

    def end(self, step: int) -> None:
        """A step is done.

        Raises:
            ConfigError: for an optimizer that keeps state of what is frozen.
        """
        self.done = step
        if self._optimizer is None:
            return
        optimizer, self._optimizer = self._optimizer, None
        frozen = [one for held, are in zip(self._held, self._are_frozen, strict=True) if are for one in held]
        if any(optimizer.state.get(one) for one in frozen):
            raise ConfigError(
                f"freeze.thaw: {type(optimizer).__name__} keeps state of parameters without gradients, so what is "
                "frozen would cost as much memory as what is trained; choose another optimizer, or freeze it for good.",
                key="freeze.thaw",
            )

    def _follow(self, micro: MicroBatch) -> None:
        """Before each micro-batch: freeze or thaw what is due."""
        for index, thaw in enumerate(self.config.thaw if self._held else ()):
            steps = thaw.frozen_steps(self.job.config)
            if (frozen := self.done < steps) == self._are_frozen[index]:
                continue
            self._are_frozen[index] = frozen
            for parameter in self._held[index]:
                parameter.requires_grad_(not frozen)
            if not frozen and self.done == steps and self.job.dist.main:
                still = sum(size for size, are in zip(self._sizes, self._are_frozen, strict=False) if are)
                tell(
                    f"freeze: {thaw.match!r} thawed after step {steps:,} ({self._sizes[index]:,} parameters); "
                    f"{sum(self._sizes) - still:,} parameters are trained now."
                )

    def _entry(self, own: Iterable[str]) -> int:
        """The entry of `thaw` that matches a frozen parameter; −1 for none.

        Raises:
            ConfigError: if two do.
        """
        hits = [at for at, thaw in enumerate(self.config.thaw) if _matches(own, [thaw.match])]
        if len(hits) > 1:
            both = " and ".join(repr(self.config.thaw[at].match) for at in hits)
            raise ConfigError(f"freeze.thaw: {both} both match {next(iter(own))!r}.", key="freeze.thaw")
        return hits[0] if hits else -1

    def _check(self, stages: Iterable[tuple[list[list[str]], list[str]]]) -> None:
        """Check the patterns against the names of all parameters and the frozen ones, by stage of a pipeline.

        Raises:
            ConfigError: for a pattern that matches nothing, and if nothing is left to train.
        """
        found = [*stages]
        everything = [own for names, _ in found for own in names]
        frozen = {name for _, names in found for name in names}
        matching = [own for own in everything if _matches(own, self.config.parameters)]
        thawing = [own for own in everything if own[0] in frozen]
        for key, patterns, owners, what in (
            ("freeze.parameters", self.config.parameters, everything, "parameter"),
            ("freeze.but", self.config.but, matching, "parameter that freeze.parameters matches"),
            ("freeze.thaw", [thaw.match for thaw in self.config.thaw], thawing, "frozen parameter"),
        ):
            names = [name for own in owners for name in own]
            for pattern in patterns:
                if not any(_matches([name], [pattern]) for name in names):
                    roots = sorted({f"{name.split('.')[0]}.*" for name in names})
                    hint = nearest(pattern, [*_patterns(names), *names]) or f" There are {format_list(roots, 8)}."
                    raise ConfigError(f"{key}: {pattern!r} matches no {what}.{hint}", key=key)
        if len(frozen) == len(everything):
            begin = " in the first steps" if self.config.thaw else ""
            raise ConfigError(
                f"freeze.parameters: nothing is left to train{begin}; name what is trained in freeze.but.",
                key="freeze.parameters",
            )


def _matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _elsewhere(part: nn.Module, own: Sequence[str]) -> Iterator[str]:
    """The names that a parameter has in other parts of a pipeline."""
    owner, _, key = own[0].rpartition(".")
    tied: Mapping[str, tuple[str, ...]] = getattr(part.get_submodule(owner), "tied_names", {})
    return (name for name in tied.get(key, ()) if name not in own)


def _patterns(names: Iterable[str]) -> list[str]:
    """Patterns that somebody may have meant: what names begin with, and modules at any depth."""
    found: dict[str, None] = {}
    for parts in (name.split(".")[:-1] for name in names):
        for at, part in enumerate(parts, 1):
            found[f"{'.'.join(parts[:at])}.*"] = None
            if at > 1 and not part.isdigit():
                found[f"*.{part}.*"] = None
    return [*found]

"""The parameters that `freeze` takes."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from forge_train import Applied, ConfigError
from forge_train.base.errors import nearest

if TYPE_CHECKING:
    from forge_train import Job

    from .freeze import Freeze


class Names:
    """The parameters of one run, by name."""

    def __init__(self, config: Freeze.Config, job: Job) -> None:
        self.config, self.job = config, job
        self._all: list[str] = []
        self._matching: list[str] = []

    def apply(self, part: nn.Module) -> Applied:
        """Freeze what matches in a part of the model. Of a tied tensor, any name may match.

        Raises:
            ConfigError: as `check` does.
        """
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in part.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        frozen = []
        for parameter, own in names.items():
            matching = [name for name in own if _matches(name, self.config.parameters)]
            self._all += own
            self._matching += matching
            if matching and not any(_matches(name, self.config.but) for name in own):
                parameter.requires_grad_(False)
                frozen.append(own[0])
        if self.job.dist.layout.stages == 1:
            self.check()
            if len(frozen) == len(names):
                raise ConfigError("freeze.but: nothing is left to train; add what is.", key="freeze.but")
        return Applied(part, tuple(frozen), f"{len(frozen)} of {len(names)} parameters")

    def check(self) -> None:
        """Check the patterns, once all stages of a pipeline have their parameters.

        Raises:
            ConfigError: for a pattern that matches nothing.
        """
        stages = self.job.dist.gather_stages((self._all, self._matching))
        everything, frozen = ([name for stage in stages for name in stage[at]] for at in (0, 1))
        for key, patterns, names in (
            ("freeze.parameters", self.config.parameters, everything),
            ("freeze.but", self.config.but, frozen),
        ):
            for pattern in patterns:
                if not any(_matches(name, [pattern]) for name in names):
                    what = "parameter" if names is everything else "parameter that freeze.parameters matches"
                    raise ConfigError(f"{key}: {pattern!r} matches no {what}.{nearest(pattern, names)}", key=key)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)

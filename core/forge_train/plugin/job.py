"""The job: what every hook is told about the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import PluginError
from ..contract.batch import CurrentStep
from ..contract.extra import Extra
from ..run.control import Control
from .calls import at_home
from .hooks import Hooks

if TYPE_CHECKING:
    import torch

    from ..config import Config
    from ..config.sections import Precision as PrecisionName
    from ..contract.model import Model
    from ..mesh.distributed import DistributedContext
    from ..run.run import Run


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run. A transform that covers `precision` makes them real."""

    param: torch.dtype
    """Of the weights while they compute."""
    compute: torch.dtype
    """Of activations."""
    reduce: torch.dtype
    """Of gradients while they are reduced over ranks."""
    master: torch.dtype
    """Of the weights the optimizer updates, and its state."""

    @classmethod
    def of(cls, name: PrecisionName) -> Precision:
        import torch

        narrow = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        return cls(param=narrow, compute=narrow, reduce=torch.float32, master=torch.float32)


@dataclass(frozen=True)
class Job:
    """One run of this process, as plugins see it."""

    config: Config
    hooks: Hooks
    run: Run
    dist: DistributedContext
    control: Control
    extra: dict[str, Extra] = field(default_factory=dict)
    """Models that `extra_models` asked for, once they are composed."""
    step: CurrentStep = field(default_factory=CurrentStep)
    """The step under way, with its micro-batches."""

    @property
    def models(self) -> Mapping[str, Model]:
        """The extra models by name: of use once the run is composed, as in `task` and `on_start`."""
        return {name: extra.model for name, extra in self.extra.items()}

    @classmethod
    def of(cls, config: Config, hooks: Hooks, run: Run, dist: DistributedContext) -> Job:
        """A run on these processes; its plugins are told of it."""
        job = cls(config, hooks, run, dist, Control(dist))
        hooks.bind(job)
        return job

    @property
    def device(self) -> torch.device:
        return self.dist.device

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.train.total_steps

    def logs(self, step: int) -> bool:
        """Return True if a step's metrics are logged."""
        return step == self.steps or step % self.config.log.every == 0

    def record(self, path: Path | str, author: object) -> None:
        """Record a file that a plugin has written, or a folder of them, with size and hash: `forge runs show` lists it,
        and trackers may send it. It is read in the background, so it must not change any more.

        Args:
            path: in the run's folder, as `run.artifact` gives it, or elsewhere.
            author: the plugin (`self`), or an object of a class in its modules.

        Raises:
            FileNotFoundError: if there is no such file.
            PluginError: if there is no such plugin.
        """
        hooks = self.hooks
        names = [name for name, plugin in hooks.plugins.items() if plugin is author]
        names += [one.name for one in at_home(type(author).__module__, hooks.enabled.values())]
        if not names:
            raise PluginError(f"{type(author).__name__} belongs to no enabled plugin.")
        self.run.artifacts.record(Path(path), names[0], f"rank-{self.dist.rank}")

    @property
    def precision(self) -> Precision:
        return Precision.of(self.config.train.precision)

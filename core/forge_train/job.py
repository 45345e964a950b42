"""The job: what every hook is told about the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config.rules import total_steps
from .loop.control import Control
from .registry.hooks import Hooks

if TYPE_CHECKING:
    import torch

    from .config import Config
    from .config.sections import Precision as PrecisionName
    from .processes.distributed import DistributedContext
    from .storage.run import Run


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

    @property
    def device(self) -> torch.device:
        return self.dist.device

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return total_steps(self.config)

    @property
    def precision(self) -> Precision:
        return Precision.of(self.config.train.precision)

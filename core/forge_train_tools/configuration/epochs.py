"""The length of a run in epochs of its data."""

from __future__ import annotations

import math
from pathlib import Path

from forge_train.base.errors import ConfigError
from forge_train.config import Config
from forge_train.mesh.layout import Layout
from forge_train.plugin.job import Hooks, Job


def count_steps(config: Config, hooks: Hooks) -> int:
    """The steps of `train.epochs`, for which the training data is opened: a `Loader` may have an attribute `epoch`.

    Raises:
        ConfigError: the data can't be opened, or its plugin does not say how much it is.
    """
    import torch

    from forge_train.mesh.distributed import DistributedContext
    from forge_train.run.run import Run

    Job.of(config, hooks, Run(Path()), DistributedContext(Layout(), torch.device("cpu")))
    loader = hooks.build_data("train")
    getattr(loader, "close", lambda: None)()
    epoch, name = getattr(loader, "epoch", None), hooks.provider("build_data")
    if epoch is None:
        raise ConfigError(
            f"train.epochs: plugin {name!r} does not say how many sequences an epoch of its data has; set train.steps "
            "or train.tokens instead."
        )
    if not epoch:
        raise ConfigError(f"train.epochs: the training data of plugin {name!r} has no sequences.")
    train = config.train
    return math.ceil(train.steps_of(train.sequences_of(epoch) * train.sequence))

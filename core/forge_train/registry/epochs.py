"""The number of steps of a run whose length is given in epochs (`train.epochs`)."""

from __future__ import annotations

import math
from pathlib import Path

from ..base.errors import ConfigError
from ..config import LENGTHS, Config
from ..config.layers import Tree
from ..config.rules import filled
from ..mesh.layout import Layout
from ..plugin.job import Hooks

UNKNOWN = 10**9
"""Steps that stand in for those of a run whose data was not opened yet."""


def displace(tree: Tree) -> None:
    """Take out the length that a preset gives, where the run's is given in epochs."""
    epochs = tree.values.get(("train", "epochs"))
    if epochs is not None and not _zero(epochs.value):
        for key in LENGTHS:
            if (
                other := tree.values.get(("train", key))
            ) is not None and other.origin.kind == "preset" != epochs.origin.kind:
                del tree.values["train", key]


def _zero(value: object) -> bool:
    """Return True for 0 in any notation; what is no number is left to the section's validation."""
    try:
        return float(str(value)) == 0
    except ValueError:
        return False


def counted(config: Config, hooks: Hooks) -> Config:
    """The configuration with the number of steps, for which the training data is opened: a `Loader` may have an
    attribute `epoch`.

    Raises:
        ConfigError: the data can't be opened, or its plugin does not say how much it is.
    """
    import torch

    from ..mesh.distributed import DistributedContext
    from ..plugin.job import Job
    from ..run.run import Run

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
    return filled(config, steps=math.ceil(train.steps_of(train.sequences_of(epoch) * train.sequence)))

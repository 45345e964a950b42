"""A head of another plugin, against the head that files in Hugging Face layout describe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forge_train import ConfigError
from forge_train_kit import hookspecs
from forge_train_kit.heads import HeadSpec

if TYPE_CHECKING:
    from forge_train import Job


def check(job: Job, divisor: float, soft_cap: float | None) -> None:
    """Check that the head computes what such a file's reader will: one product with its weight, divided and capped.

    It is asked, with a small head that the plugin makes: its class tells nothing about its forward pass.

    Raises:
        ConfigError: naming the plugin.
    """
    spec = HeadSpec(8, 12, 1.0, divisor, soft_cap)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        head: Any = hookspecs.head(spec, job)
        shapes = {name: tuple(one.shape) for name, one in head.named_parameters()}
        fits = shapes == {"weight": (spec.vocabulary, spec.dim)}
        if fits:
            head.weight.normal_()
            hidden = torch.randn(2, 3, spec.dim)
            expected = hidden @ head.weight.T / divisor
            if soft_cap is not None:
                expected = (expected / soft_cap).tanh() * soft_cap
            fits = torch.allclose(head.eval()(hidden), expected, atol=1e-5)
    if not fits:
        raise ConfigError(
            f"the head of plugin {job.hooks.provider('head')!r} computes other logits than the one product of a "
            "language model in Hugging Face layout, so that the file would be of another model. Export another run, or "
            "write the head with a hook export_hf of your own."
        )

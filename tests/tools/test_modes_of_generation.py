"""Generation in torch's inference mode where nothing is trained, and training after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from forge_train import Job, Model, Plugin, hookimpl
from forge_train.run.run import Run
from generation_rows import generated, requests, worst

pytestmark = pytest.mark.unit


class Adding(Plugin):
    """Moves activations along a gradient that it computes."""

    api = (1, 0)

    @hookimpl
    def intervene(self) -> Mapping[str, Callable[..., Tensor]]:
        def moved(values: Tensor, positions: Any) -> Tensor:
            with torch.enable_grad():
                given = values.detach().clone().requires_grad_()
                (gradient,) = torch.autograd.grad(given.square().sum(), given)
            return values + 0.1 * gradient

        return {"layers.0": moved}


def trained(job: Job) -> Job:
    """The same job, as of a run."""
    return replace(job, run=Run(Path("nowhere")))


def modes(job: Job, model: Model) -> set[bool]:
    """Whether the model computes in inference mode."""
    found = set()
    layer = model.parts[0].get_submodule("layers.0.attention.q")
    hook = layer.register_forward_hook(lambda *_: found.add(torch.is_inference_mode_enabled()))
    generated(job, model, requests(3), 2)
    hook.remove()
    return found


def test_only_a_model_that_is_not_trained_computes_in_inference_mode() -> None:
    job, model = tiny_models.composed()
    assert modes(job, model) == {True}
    assert modes(trained(job), model) == {False}
    assert not torch.is_inference_mode_enabled()
    assert worst(generated(job, model, requests(9), 3), generated(trained(job), model, requests(9), 3)) == 0


def test_an_intervention_may_compute_gradients() -> None:
    assert modes(*tiny_models.composed(plugins=(f"{__name__}:Adding",))) == {False}


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flex"])
def test_a_model_can_be_trained_after_it_has_generated(kernel: str) -> None:
    """Layers keep the masks of a batch, and the next batch may have the same shape."""
    job, model = tiny_models.composed("decoder.window=6", plugins=(kernel,))
    row = requests(3)[2]
    generated(job, model, [row], 1)
    model(torch.tensor([row.ids[: row.prompt]])).sum().backward()
    assert all(one.grad is not None for name, one in model.named_parameters() if not name.startswith("head"))

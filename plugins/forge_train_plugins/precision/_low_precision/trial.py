"""Trial at start-up of whether low precision pays on this device, with the shapes of the model's layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from . import kernels
from .layers import Candidate, Grouped, Linear
from .products import Recipe

if TYPE_CHECKING:
    from forge_train import Job

MOST = 2e9
"""Multiplications of one product that is timed on a CPU; fewer tokens are taken where there would be more."""

Shape = tuple[int, ...]
"""Experts (none for a linear layer), outputs, inputs."""


def slower(job: Job, linear: Recipe, experts: Recipe, found: Sequence[Candidate]) -> dict[str, str]:
    """The modules for which forward and backward take no less time than in the precision of the run.

    All ranks agree: an option that is slower on one rank counts as slower.
    """
    shapes = {one.name: _shape(one) for one in found}
    several = sorted(set(shapes.values()))
    with torch._dynamo.config.patch(recompile_limit=4 * len(several) + 8, accumulated_recompile_limit=1024):
        mine = {shape: _speed(job, shape, linear if len(shape) == 2 else experts) for shape in several}
    least: dict[Shape, float] = {}
    for rank in job.dist.gather_objects(mine):
        for shape, speed in rank.items():
            least[shape] = min(speed, least.get(shape, speed))
    return {
        name: f"{' × '.join(map(str, shape))} runs at {least[shape]:.2f} × the speed here"
        for name, shape in shapes.items()
        if least[shape] <= 1.0
    }


def _shape(one: Candidate) -> Shape:
    outputs, inputs = one.shapes[0]
    return (int(one.weights[0].shape[0]), outputs, inputs) if one.experts else (outputs, inputs)


def _speed(job: Job, shape: Shape, recipe: Recipe) -> float:
    """Return the speed relative to full precision."""
    train, device, dtype = job.config.train, job.device, job.precision.compute
    tokens = train.micro_batch * train.sequence
    if device.type == "cpu":
        tokens = max(16, min(tokens, int(MOST / (shape[-1] * shape[-2]))) // 16 * 16)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype, generator=generator).requires_grad_()

    x, weight, gradient = draw(tokens, shape[-1]), draw(*shape), draw(tokens, shape[-2]).detach()
    if len(shape) == 2:
        plain, low = as_in_the_run(job, F.linear), as_in_the_run(job, Linear(recipe))
        return _seconds(device, x, weight, gradient, lambda: plain(x, weight)) / _seconds(
            device, x, weight, gradient, lambda: low(x, weight)
        )
    each = tokens // shape[0]
    sizes = torch.full((shape[0],), each, device=device)
    plain, low = as_in_the_run(job, _Plain.apply), as_in_the_run(job, Grouped(recipe))
    return _seconds(device, x, weight, gradient, lambda: plain(x, weight, sizes)) / _seconds(
        device, x, weight, gradient, lambda: low(x, weight, sizes)
    )


def as_in_the_run(job: Job, product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product, compiled if the run's units are: rounding and scaling then take a fraction of their time."""
    for name, enabled in job.hooks.enabled.items():
        if "compile" in enabled.cls.provides:
            backend = getattr(job.hooks.plugins[name].config, "backend", "inductor")

            def compiled(*given: Tensor) -> Tensor:  # torch compiles no function of its own
                return product(*given)

            return torch.compile(compiled, backend=backend, dynamic=False)
    return product


class _Plain(torch.autograd.Function):
    """The grouped product that experts have otherwise."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, sizes)
        return kernels.grouped(x, weight, sizes)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, sizes = ctx.saved_tensors  # type: ignore[attr-defined]
        of_x = kernels.grouped(gradients[0], weight.transpose(1, 2), sizes)
        return of_x, kernels.grouped_outer(gradients[0], x, sizes), None


def _seconds(device: torch.device, x: Tensor, weight: Tensor, gradient: Tensor, forward: Callable[[], Tensor]) -> float:
    """The least of several passes forward and backward."""
    best = float("inf")
    for _ in range(4 if device.type == "cpu" else 12):
        _wait(device)
        started = time.perf_counter()
        torch.autograd.grad(forward(), (x, weight), gradient)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""What happens once a step: the load of experts is counted over all ranks, biases follow it, numbers are logged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_train import DivergedError, Job, Model, StepResult

from .block import MEASURES, MoEFeedForward, Routed

if TYPE_CHECKING:
    from ..moe import MoE


class Watch:
    """The layers with experts, after composition."""

    def __init__(self, config: MoE.Config, job: Job, model: Model) -> None:
        self.config, self.job = config, job
        blocks = [module for _, module in model.named_modules() if isinstance(module, MoEFeedForward)]
        self.layers: dict[int, Routed] = {block.index: block.routed for block in blocks}

    def step(self, step: StepResult) -> None:
        """Look at a step's statistics, and forget them."""
        if not self.layers:
            return  # another stage of a pipeline has them
        every = self.job.config.log.every
        logged = step.step % every == 0 or step.step == self.job.steps
        if logged or self.config.bias_speed:
            seen = self._counted()
            if self.config.bias_speed and not step.skipped:
                self._move_biases(seen)
            if logged:
                self._log(step, seen)
        torch._foreach_zero_([layer.statistics for layer in self.layers.values()])

    def _counted(self) -> Tensor:
        """Statistics over all ranks, `[layers, experts + measures]`."""
        seen = torch.stack([layer.statistics for layer in self.layers.values()])
        seen = self.job.dist.all_reduce(seen, axis="data")
        split = self.job.dist.layout.etp == 1  # each tensor-parallel rank has routed its own share of the tokens
        return self.job.dist.all_reduce(seen, axis="tp") if split else seen

    def _move_biases(self, seen: Tensor) -> None:
        """Up for experts with less than the mean load, down for those with more (arXiv:2408.15664, algorithm 1)."""
        loads = seen[:, : -len(MEASURES)]
        moves = self.config.bias_speed * (loads.mean(1, keepdim=True) - loads).sign()
        torch._foreach_add_(self._biases(), list(torch.unbind(moves)))

    def _biases(self) -> list[Tensor]:
        return [layer.router.bias for layer in self.layers.values() if layer.router.bias is not None]

    def _log(self, step: StepResult, seen: Tensor) -> None:
        loads, rest = seen[:, : -len(MEASURES)], seen[:, -len(MEASURES) :]
        measured = dict(zip(MEASURES, rest.unbind(1), strict=True))
        self._check(measured["broken"], step)
        tokens, assigned = measured["tokens"], loads.sum(1)
        found = {
            "load": loads.amax(1) / loads.mean(1),
            "entropy": measured["entropy"] / tokens,
            "dropped": measured["dropped"] / assigned,
        }
        if self.config.balance:
            found["balance"] = measured["balance"] / tokens
        if self.config.bias_speed:
            biases = torch.stack(self._biases())
            found["bias_range"] = biases.amax(1) - biases.amin(1)
        for name, values in found.items():
            step.add(name, values.mean())
            if self.config.metrics == "layers":
                for index, value in zip(self.layers, values, strict=True):
                    step.add(f"{name}.{index}", value)

    def _check(self, broken: Tensor, step: StepResult) -> None:
        """Raises DivergedError, naming the first layer whose router gave something that is no number."""
        layers = [index for index, bad in zip(self.layers, broken.tolist(), strict=True) if bad]
        if layers and not step.skipped:
            raise DivergedError(
                f"moe: at step {step.step} the router of layer {layers[0]} is the first that gives logits that are not "
                "finite. Try a lower learning rate, more warm-up, or moe.z_loss = 0.001."
            )

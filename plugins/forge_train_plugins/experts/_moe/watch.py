"""Runs once a step: counts the load of experts over all ranks, updates biases by it, and logs metrics."""

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
        self.everywhere = sorted({index for stage in job.dist.gather_stages(list(self.layers)) for index in stage})
        """The layers with experts in all stages of a pipeline."""

    def step(self, step: StepResult) -> None:
        """Read a step's statistics, and reset them."""
        if not self.everywhere:
            return
        every = self.job.config.log.every
        logged = step.step % every == 0 or step.step == self.job.steps
        if logged or self.config.bias_speed:
            seen = self._counted() if self.layers else None
            if seen is not None and self.config.bias_speed and not step.skipped:
                self._move_biases(seen)
            if logged:
                self._log(step, self._measured(seen))
        if self.layers:
            torch._foreach_zero_([layer.statistics for layer in self.layers.values()])

    def _counted(self) -> Tensor:
        """Statistics over all ranks, `[layers, experts + measures]`."""
        seen = torch.stack([layer.statistics for layer in self.layers.values()])
        seen = self.job.dist.all_reduce(seen, axis="data")
        split = self.job.dist.layout.etp == 1  # each tensor-parallel rank routed its own share of the tokens
        return self.job.dist.all_reduce(seen, axis="tp") if split else seen

    def _move_biases(self, seen: Tensor) -> None:
        """Raise biases of experts with less than the mean load, lower the others (arXiv:2408.15664, algorithm 1)."""
        loads = seen[:, : -len(MEASURES)]
        moves = self.config.bias_speed * (self._mean(loads) - loads).sign()
        torch._foreach_add_(self._biases(), list(torch.unbind(moves)))

    def _mean(self, loads: Tensor) -> Tensor:
        """The mean over the experts of each one's group, `[layers, experts]`."""
        return next(iter(self.layers.values())).router.mean_loads(loads)

    def _biases(self) -> list[Tensor]:
        return [layer.router.bias for layer in self.layers.values() if layer.router.bias is not None]

    def _measured(self, seen: Tensor | None) -> dict[str, Tensor]:
        """Metrics of every layer, and `broken`, whether its router gave non-finite values: `[layers]` each, for all
        stages of a pipeline."""
        names = ["broken", "load", "entropy", "dropped"]
        names += ["balance"] * bool(self.config.balance) + ["bias_range"] * bool(self.config.bias_speed)
        table = torch.zeros(len(names), len(self.everywhere), device=self.job.device)
        if seen is not None:
            found = self._of_layers(seen)
            here = [self.everywhere.index(index) for index in self.layers]
            table[:, here] = torch.stack([found[name].to(table) for name in names])
        if self.job.dist.layout.pp > 1:
            self.job.dist.all_reduce(table, axis="pp")
        return dict(zip(names, table.unbind(), strict=True))

    def _of_layers(self, seen: Tensor) -> dict[str, Tensor]:
        """The same for this stage's layers."""
        loads, rest = seen[:, : -len(MEASURES)], seen[:, -len(MEASURES) :]
        measured = dict(zip(MEASURES, rest.unbind(1), strict=True))
        found = {
            "broken": measured["broken"],
            "load": (loads / self._mean(loads).clamp(min=1 / loads.shape[1])).amax(1),
            "entropy": measured["entropy"] / measured["tokens"],
            "dropped": measured["dropped"] / loads.sum(1),
            "balance": measured["balance"] / measured["tokens"],
        }
        if self.config.bias_speed:
            biases = torch.stack(self._biases())
            found["bias_range"] = biases.amax(1) - biases.amin(1)
        return found

    def _log(self, step: StepResult, found: dict[str, Tensor]) -> None:
        self._check(found.pop("broken"), step)
        for name, values in found.items():
            step.add(name, values.mean())
            if self.config.metrics == "layers":
                for index, value in zip(self.everywhere, values, strict=True):
                    step.add(f"{name}.{index}", value)

    def _check(self, broken: Tensor, step: StepResult) -> None:
        """Raises DivergedError, naming the first layer whose router gave non-finite values."""
        layers = [index for index, bad in zip(self.everywhere, broken.tolist(), strict=True) if bad]
        if layers and not step.skipped and not self.job.control.rolls_back:
            raise DivergedError(
                f"moe: at step {step.step} the router of layer {layers[0]} was the first to give logits that are not "
                "finite. Try a lower learning rate, more warm-up, or moe.z_loss = 0.001."
            )

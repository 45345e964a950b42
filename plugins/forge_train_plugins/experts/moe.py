"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import ConfigError, Ge, Gt, Lt, Plugin, Problem, hookimpl, section
from forge_train_kit.layers import FeedForward, Layer

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Model, StepResult
    from forge_train.config import Config as RunConfig


class MoE(Plugin):
    """Mixture of experts: each token takes the few feed-forward blocks its router chooses (arXiv:2101.03961)."""

    api = (1, 0)
    facts = {"plan.per_unit": True}
    requires = ("token_dispatch",)

    @section
    class Config:
        experts: Annotated[int, Gt(0)] = 8
        """Number of experts in each layer."""
        top_k: Annotated[int, Gt(0)] = 2
        """Number of experts that a token goes to."""
        hidden: Annotated[int, Ge(0)] = 0
        """Width of one expert; 0 divides the dense block's width by the number of experts that a token uses, so that
        they compute as much as the dense block, and rounds up to a multiple of 16."""
        shared: Annotated[int, Ge(0)] = 0
        """Number of experts of that width that every token takes in addition to its own (arXiv:2401.06066)."""
        dense_first: Annotated[int, Ge(0)] = 0
        """Number of layers, from the first, that keep their dense block."""
        every: Annotated[int, Gt(0)] = 1
        """Every n-th of the other layers has experts: the last of each n."""
        activation: Literal["swiglu", "geglu", "reglu", "clamped_swiglu"] = "swiglu"
        """Activation of the experts: `down(act(gate(x)) · up(x))`. clamped_swiglu (GPT-OSS) is
        `down((u + 1) · g · sigmoid(alpha · g))`, with g = gate(x) clamped to at most `limit` and u = up(x) clamped to
        ±`limit`."""
        router: Literal["softmax", "sigmoid", "expert_choice"] = "softmax"
        """Computation of scores from logits; under `expert_choice` each expert takes its best tokens of the
        micro-batch (arXiv:2202.09368), so a token's output depends on later tokens and the model can't generate."""
        normalise: bool = True
        """Divide the weights of a token's experts by their sum."""
        scaling: Annotated[float, Gt(0)] = 1.0
        """Factor on the weights."""
        groups: Annotated[int, Gt(0)] = 1
        """Groups of neighbouring experts (arXiv:2412.19437, §2.1.2)."""
        top_groups: Annotated[int, Gt(0)] = 1
        """Number of groups that a token may choose from: those whose best scores have the largest sum."""
        bias_speed: Annotated[float, Ge(0)] = 0.0
        """Change per step of a bias that is added to the scores for the choice alone: up for experts with less than the
        mean load of the global batch, down for others (arXiv:2408.15664). 0 disables it; DeepSeek-V3 uses 0.001."""
        balance: Annotated[float, Ge(0)] = 0.01
        """Weight of the load-balancing loss, a mean over layers and over all tokens, masked or not (arXiv:2101.03961,
        eq. 4). With even loads the loss is 1, but `top_k` in transformers, so this weight is its `router_aux_loss_coef`
        times `top_k`. transformers pools the loads of all layers; here each layer is balanced on its own."""
        balance_over: Literal["batch", "sequence"] = "sequence"
        """Tokens over which the load is balanced: those of each sequence (arXiv:2412.19437, eq. 17), or of a
        micro-batch, which makes the loss depend on the layout if its micro-batches differ."""
        z_loss: Annotated[float, Ge(0)] = 0.0
        """Weight of the mean squared log-partition of the logits (arXiv:2202.08906, eq. 5)."""
        capacity: Annotated[float, Ge(0)] = 0.0
        """Most assignments that an expert takes of a micro-batch, as a multiple of the mean; beyond it, those with the
        least weight are dropped. 0 drops none (under `expert_choice`, 0 means 1). Evaluation and generation drop
        none."""
        jitter: Annotated[float, Ge(0), Lt(1)] = 0.0
        """In training, the router's input is multiplied by uniform noise from 1 ± this."""
        matmul: Literal["auto", "grouped", "loop"] = "auto"
        """One grouped product for all experts, or one product for each; auto uses the grouped one if torch has it."""
        metrics: Literal["mean", "layers"] = "mean"
        """Log only the mean over layers, or also each layer."""
        alpha: Annotated[float, Gt(0)] = 1.702
        """Of clamped_swiglu."""
        limit: Annotated[float, Gt(0)] = 7.0
        """Of clamped_swiglu."""
        bias: bool = False
        """Biases in the router's logits and in the experts' projections."""

        group_best: Annotated[int, Gt(0)] = 2
        """Number of best scores that are summed for a group: 2 in DeepSeek-V3, 1 in DeepSeek-V2 (arXiv:2405.04434,
        §2.2.2)."""

        def layers(self, count: int) -> list[int]:
            """The layers with experts, given the number of layers."""
            return list(range(self.dense_first, count))[self.every - 1 :: self.every]

        def width(self, dense: int) -> int:
            """Width of one expert, given the width of a dense block."""
            return self.hidden or -(-dense // (16 * (self.top_k + self.shared))) * 16

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._watch: Any = None

    @hookimpl
    def feed_forward(self, layer: Layer, job: Job) -> FeedForward | None:
        sparse = self.config.layers(layer.num_layers)
        if not sparse:
            raise ConfigError(
                f"moe: none of the {layer.num_layers} layers has experts with "
                f"moe.dense_first = {self.config.dense_first} and moe.every = {self.config.every}."
            )
        if layer.index not in sparse:
            return None
        from ._moe.block import build
        from ._moe.rules import groups_of

        return build(self.config, layer, job, of=len(sparse), groups=groups_of(self.config, job))

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        from ._moe.rules import check

        yield from check(self.config, config)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        from ._moe.watch import Watch

        self._watch = Watch(self.config, job, model)

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self._watch.step(step)

"""Narrow arithmetic where weights are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from forge_train import Phase, Plugin, Transform, hookimpl, section

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_train import Applied, Job, Model


@section
class DtypeRule:
    """Modules that compute in another dtype than the rest."""

    match: str
    """A module's name, or a pattern with `*`, `?` and `[…]` as in a shell; `*` matches dots too. All that is in a
    module computes as it does. A name beats patterns, and of several names the nearest counts."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of weights and activations."""


class Precision(Plugin):
    """Computes in the dtype of `train.precision`, from weights that stay fp32; without autocast.

    Every module that owns weights reads them as narrow copies, made anew in each forward pass, so that activations are
    narrow too; gradients come back in fp32, and names, optimizer and checkpoints do not change. A transform that covers
    the precision itself (`fsdp2` gathers weights in the narrow dtype) makes this one step aside.

    Recomputation (`ac`) makes the copies again; selective `ac.save` with `aten._to_copy.default` keeps them instead, at
    2 bytes for each parameter. By data sheets, that is worth 1% of a step of 8,192 tokens on an H100.

    `rules` name modules with another dtype, under every sharding: what goes into such a module is cast to its dtype,
    and what comes out to that of the module around it. The head's logits stay as they are. Parameters that are narrow
    at rest (`bf16_parameters`) have no wider copies to read, so rules are refused with them.
    """

    api = (1, 0)
    provides = ("precision",)
    facts = {"plan.per_unit": True}

    @section
    class Config:
        rules: tuple[DtypeRule, ...] = ()
        """Modules by name or pattern, each with its dtype."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._rules: Any = None

    @hookimpl
    def parallelize(self, job: Job) -> list[Transform]:
        from ._precision import Rules, narrow

        dtype, rules = job.precision.param, self.config.rules
        made = []
        if rules:
            self._rules = Rules(rules, job)
            made.append(Transform(Phase.FLOAT8, "compute_dtypes", self._rules.apply, conflicts=("parameter_dtype",)))
        if rules or dtype is not job.precision.master:

            def apply(part: nn.Module) -> Applied:
                return narrow(part, dtype, job.precision.master)

            # After what replaces or adds layers, before recompute and compile take the forward passes over.
            after = ("compute_dtypes", "fp8")
            made.append(Transform(Phase.FLOAT8, "precision", apply, after=after, covers=("precision",), fallback=True))
        return made

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        if self._rules is not None:
            self._rules.judge()

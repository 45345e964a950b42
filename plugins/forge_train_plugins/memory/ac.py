"""Activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import ConfigError, Ge, Gt, Le, Phase, Plugin, Problem, Transform, hookimpl, section

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Applied, Job, Span, SpanName
    from forge_train.config import Config as RunConfig


class ActivationCheckpointing(Plugin):
    """Frees activations in the forward pass and computes them again in the backward pass (arXiv:1604.06174).

    It acts on the `units` that the model declares. What comes out is the same to the bit, random numbers included.
    """

    api = (1, 0)
    layout = True
    provides = ("ac",)
    facts = {
        "memory.saves": ("activations",),
        "plan.per_unit": True,
        "plan.search": ("ac.mode=full", "ac.mode=selective"),
    }

    @section
    class Config:
        mode: Literal["full", "selective", "memory_budget", "none"] = "full"
        """full keeps a unit's input alone (compiled under tensor parallelism, attention's result too); selective also
        what the operations in `save` have computed, and, in a compiled unit with code that torch.compile leaves alone
        (experts), the input of each of its children; memory_budget has the compiler choose what to keep (needs the
        plugin `compile`)."""
        every: Annotated[int, Gt(0)] = 1
        """Recompute one unit in so many, the first of them (full, selective)."""
        save: tuple[str, ...] = ("attention", "matmul")
        """Results that selective keeps: `attention`; `matmul`, or `alternate_matmul` for every second one;
        `collectives` (the results of tensor-parallel sums, which are then not communicated again); names such as
        `aten.mm.default`."""
        budget: Annotated[float, Ge(0), Le(1)] = 0.5
        """Share of the activations that memory_budget may keep: 0 is the least possible, 1 all."""

    config: Config

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        own, default = self.config, self.Config()
        if own.mode != "selective" and own.save != default.save:
            yield Problem("ac.save", f"has no effect with mode = {own.mode!r}; use mode = 'selective'.")
        if own.mode != "memory_budget" and own.budget != default.budget:
            yield Problem("ac.budget", f"has no effect with mode = {own.mode!r}; use mode = 'memory_budget'.")
        if own.mode in ("memory_budget", "none") and own.every != default.every:
            yield Problem("ac.every", f"has no effect with mode = {own.mode!r}.")
        if own.mode == "selective" and not own.save:
            yield Problem("ac.save", "names nothing to keep; use mode = 'full' for that.")

    @hookimpl
    def parallelize(self, job: Job) -> Transform | None:
        if self.config.mode == "none":
            return None
        requires = ("compile",) if self.config.mode == "memory_budget" else ()
        # torch (2.13) can't compile a recomputed attention beside weights that are DTensors: it confuses the state of
        # random numbers that it saves for attention's dropout with the DTensors' mesh.
        compiled = "compile" in job.hooks.enabled
        keep_attention = job.dist.layout.tp > 1 and compiled
        return Transform(
            Phase.RECOMPUTE,
            "ac",
            lambda part: self._apply(part, job, compiled=compiled, keep_attention=keep_attention),
            requires=requires,
        )

    @hookimpl
    def around(self, span: SpanName, job: Job) -> Span | None:
        if self.config.mode != "memory_budget" or span != "forward_backward":
            return None
        import torch._functorch.config as functorch

        def budget() -> AbstractContextManager[Any]:  # read when a unit is compiled: in the first forward and backward
            patched: AbstractContextManager[Any] = functorch.patch(activation_memory_budget=self.config.budget)
            return patched

        return budget

    def _apply(self, part: nn.Module, job: Job, *, compiled: bool, keep_attention: bool) -> Applied:
        from forge_train import Applied

        from ._ac import Policy, breaks, recompute, recompute_broken

        units: tuple[str, ...] = tuple(getattr(part, "units", ()))
        if not units and job.dist.layout.pp > 1:  # a part with the embedding or the head alone
            return Applied(part)
        if not units:
            raise ConfigError(f"ac: the model ({type(part).__name__}) declares no units to recompute.")
        if self.config.mode == "memory_budget":
            return Applied(part, units, f"the compiler keeps {self.config.budget:.0%} of the activations")
        chosen = units[:: self.config.every]
        modules = [part.get_submodule(name) for name in chosen]
        broken = [module for module in modules if compiled and breaks(module)]
        save = self.config.save if self.config.mode == "selective" else ()
        if keep_attention and "attention" not in save and (save or len(broken) < len(modules)):
            save = ("attention", *save)
        policy = Policy.of(save) if save else None
        recompute((module for module in modules if module not in broken), policy)
        recompute_broken(broken, policy if self.config.mode == "selective" else None)
        note = f"{len(chosen)} of {len(units)} units, {self.config.mode}"
        if policy is None:
            return Applied(part, chosen, note)
        return Applied(part, chosen, f"{note}: {', '.join(save)} kept", after_backward=policy.report)

"""Context parallelism with one thing done wrong, for `forge verify` to find. Enable as `context_sabotage:Unscaled`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from forge_train import Applied, Transform, hookimpl
from forge_train_kit.layers import AttentionOptions
from forge_train_plugins.parallel._cp import ring
from forge_train_plugins.parallel._cp.kernel import ContextKernel, Ranks, Sequences
from forge_train_plugins.parallel.cp import ContextParallel


class Wrapping(ContextParallel):
    """Changes each context kernel once it is there."""

    @hookimpl
    def parallelize(self, job: Any) -> Transform | None:
        transform = super().parallelize(job)

        def apply(part: nn.Module) -> Applied:
            assert transform is not None
            applied = transform.apply(part)
            for name in applied.matched:
                self.spoil(part.get_submodule(name).kernel)  # type: ignore[arg-type]
            return applied

        return transform and replace(transform, apply=apply)

    def spoil(self, kernel: ContextKernel) -> None:
        raise NotImplementedError


class Unscaled(Wrapping):
    """Leaves a block's partial result unscaled where a ring merges it: the log-sum-exp is right, the sum is not."""

    def spoil(self, kernel: ContextKernel) -> None:
        right = kernel._passed_on

        def passed_on(*given: Any) -> Any:
            with patch.object(ring, "merge", unscaled):
                return right(*given)

        kernel._passed_on = passed_on  # type: ignore[method-assign]


def unscaled(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> tuple[Tensor, Tensor]:
    return out + part, torch.logaddexp(sums, part_sums.to(sums.dtype))


class LocalDropout(Wrapping):
    """Drops the weights of a block by positions that are counted from the block's first key."""

    def spoil(self, kernel: ContextKernel) -> None:
        right = kernel.kernel

        def local(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
            if (dropped := options.dropout) is not None:
                options = replace(options, dropout=dropped._replace(start=0))
            return right(query, key, value, options)

        kernel.kernel = local


class Borderless(Wrapping):
    """Takes a document that begins in another slice for one with all that stands before it."""

    def spoil(self, kernel: ContextKernel) -> None:
        kernel.ranks = BorderlessRanks(kernel.ranks.everybody, kernel.ranks.heads, kernel.ranks.along)


class BorderlessRanks(Ranks):
    def _found(self, slices: Tensor | None, each: int, ends: Tensor | None) -> Sequences:
        found = super()._found(slices, each, ends)
        if found.starts is None:
            return found
        starts = found.starts.clone()
        for own in found.cut.spans:
            for start, stop in own:
                inside = starts[:, start:stop]
                inside[inside < start] = 0
        return replace(found, starts=starts, lowest=starts.amin(0).tolist())

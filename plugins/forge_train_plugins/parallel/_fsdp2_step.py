"""FSDP2 within a step: when to gather and drop weights, and when to reduce gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from forge_train import MicroBatch


class Chunks:
    """Keeps a module that is called several times per micro-batch gathered until the last call's backward.

    FSDP2 (2.13) drops the weights after the backward of each call: a loss in sixteen chunks would gather the head's
    sixteen times. Their gradients arrive together, after the last.
    """

    def __init__(self, module: FSDPModule) -> None:
        self.module = module
        self.drop = True
        self.open = 0
        assert isinstance(module, nn.Module)
        module.register_forward_hook(self._called)

    def _called(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recomputing = torch._C._current_graph_task_id() != -1
        if isinstance(output, Tensor) and output.requires_grad and not recomputing:
            self.open += 1
            output.register_hook(self._backward)  # type: ignore[no-untyped-call]

    def _backward(self, gradient: Tensor) -> None:
        self.open -= 1
        self.module.set_reshard_after_backward(self.drop and not self.open, recurse=False)


class ShardedStep:
    """Step hooks of one sharded part, called by the engine.

    The loss calls what shares its weight with the part, such as a tied head, after the part's forward: nothing gathers
    such a weight again before its backward. With several micro-batches under way, as in a pipeline, the part's own
    group therefore stays gathered until all of them are back.
    """

    def __init__(
        self, root: FSDPModule, heads: list[Chunks], *, drop_last_only: bool, reduce_each: bool, split: bool
    ) -> None:
        self.root, self.heads, self.split = root, heads, split
        self.drop_last_only, self.reduce_each = drop_last_only, reduce_each
        self.under_way = 0

    def begin(self, micro: MicroBatch) -> None:
        drop = (micro.last or not self.drop_last_only) and not self.split
        self.under_way += {"forward": 1, "backward": -1}.get(micro.direction, 0)
        if micro.direction != "forward":
            _note_dtypes(self.root)
            self.root.set_requires_gradient_sync((micro.last and not self.split) or self.reduce_each)
            self.root.set_reshard_after_backward(drop)
            if self.under_way:
                self.root.set_reshard_after_backward(False, recurse=False)
        # `set_is_last_backward(False)` would keep the order of this forward pass, by which the next backward prefetches
        # (2.13): it would end by gathering the head for the previous micro-batch, which no longer needs it.
        for head in self.heads:
            head.drop = drop
            if micro.direction == "both":
                head.open = 0

    def finish(self) -> None:
        self.under_way = 0
        if self.split:
            self.root.set_requires_gradient_sync(True)
            self.root.set_reshard_after_backward(True)
            # What autograd calls at the end of a backward pass; each group that has not reduced does.
            fully_shard.state(self.root)._root_post_backward_final_callback()  # type: ignore[attr-defined]
        for head in self.heads:
            if head.open:  # some of what it gave was never used
                head.module.reshard()
                head.open = 0

    def free_gathered(self) -> None:
        for module in _sharded(self.root):
            module.reshard()


def _note_dtypes(root: FSDPModule) -> None:
    """Have FSDP2 (2.13) find out in which dtypes a group's gradients come: it does so in the first forward, where a
    group of which nothing was trained yet has none."""
    for module in _sharded(root):
        group: Any = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
        if group is None or getattr(group, "_orig_dtype", group) is not None:
            continue
        if any(one.sharded_param.requires_grad for one in group.fsdp_params):
            group._init_mp_dtypes()


def _sharded(root: FSDPModule) -> Iterable[FSDPModule]:
    assert isinstance(root, nn.Module)
    return [module for module in root.modules() if isinstance(module, FSDPModule)]

"""The second half of a backward pass: gradients of weights, from what the first half left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from forge_train.mesh.tensors import local


def add_weight_gradients(weights: Sequence[nn.Parameter], groups: Sequence[dict[str, Any]]) -> None:
    """Add the gradients of weights to their `grad`.

    Unlike torch's `stage_backward_weight`, allows a graph in which weights share nodes: torch forms groups that
    overlap, counts a weight once for each, and frees nodes that another group still needs.

    Args:
        weights: all that are trained.
        groups: as `stage_backward_input` of torch.distributed.pipelining returns them.

    Raises:
        KeyError: if a weight is another tensor than in the first half.
    """
    owners = {_accumulator(weight): weight for weight in weights}
    # A group of several nodes runs through nodes of other groups, on its way from one to the next: it comes first, and
    # frees nothing.
    for params, reached in sorted(_joined(groups), key=lambda group: -len(group[1])):
        edges, gradients = [], []
        for node, given in reached.items():
            for index, gradient in enumerate(given):
                if gradient is not None:
                    edges.append(GradientEdge(node, index))
                    gradients.append(gradient)
        if not edges:
            continue
        targets = [owners[param] for param in params]
        # A node after another one of the group gets its whole gradient already, and none of it again from there.
        handles = (
            [node.register_prehook(_instead(given)) for node, given in reached.items()] if len(reached) > 1 else []
        )
        try:
            wanted = tuple(GradientEdge(param, 0) for param in params)
            found: Any = torch.autograd.grad(edges, wanted, gradients, retain_graph=len(reached) > 1, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        taken = {_memory(gradient) for gradient in gradients}  # an addition hands on what it was given
        for weight, gradient in zip(targets, found, strict=True):
            if gradient is not None and weight.grad is not None:
                weight.grad.add_(gradient)
            elif gradient is not None:
                weight.grad = gradient.clone() if _memory(gradient) in taken else gradient
                taken.add(_memory(gradient))
    for group in groups:
        group.clear()  # hooks refer to it, and it to the graph


def _accumulator(weight: nn.Parameter) -> Node:
    """The node of autograd's graph that stands for a weight."""
    view = weight.view_as(weight).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    return node


def _memory(gradient: Tensor) -> int:
    memory: int = local(gradient).untyped_storage()._cdata
    return memory


def _instead(given: tuple[Tensor | None, ...]) -> Callable[[Any], Any]:
    return lambda _: given


Reached = dict[Node, tuple[Tensor | None, ...]]


def _joined(groups: Sequence[dict[str, Any]]) -> list[tuple[list[Node], Reached]]:
    """Groups of weights, and of nodes with their gradients; those that have any in common are one."""
    found: list[tuple[dict[Node, None], Reached]] = []
    for group in groups:
        params = dict.fromkeys(group["params"])
        given = group.get("grads") or [None] * len(group["intermediates"])
        reached = {node: some for node, some in zip(group["intermediates"], given, strict=True) if some is not None}
        apart = []
        for others, nodes in found:
            if params.keys() & others.keys() or reached.keys() & nodes.keys():
                params, reached = others | params, nodes | reached
            else:
                apart.append((others, nodes))
        found = [*apart, (params, reached)]
    return [(list(params), reached) for params, reached in found]

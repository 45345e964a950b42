"""Copies of weights in the layout by which a CPU multiplies several rows in the least time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LEAST = 2**16
"""Elements of the smallest weight that is packed; for smaller ones, calling oneDNN takes longer than the product."""
MOST = 2**28
"""Bytes of all packed weights, which are held beside the model's own."""
ABLE = ("AVX2", "AVX512")
"""CPUs on which a row's numbers do not depend on those beside it, from two rows on. With AVX alone they do."""


@contextmanager
def packed(parts: Iterable[nn.Module]) -> Iterator[None]:
    """A block in which linear layers multiply several rows by packed weights, as long as these take `MOST` bytes.

    oneDNN (3.12) takes a third to two thirds of MKL's time for eight rows. Where a weight was changed or exchanged
    since, where there are gradients, and for a single row, which memory bounds, layers do what they do elsewhere.
    """
    found: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    able = found and torch.backends.cpu.get_cpu_capability() in ABLE
    room, changed = MOST, list[nn.Linear]()
    try:
        for layer in dict.fromkeys(_linear(parts)) if able else ():
            if layer.weight.nbytes <= room:
                room -= layer.weight.nbytes
                layer.forward = _multiply(layer)  # type: ignore[method-assign, assignment]
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def _linear(parts: Iterable[nn.Module]) -> Iterator[nn.Linear]:
    """Layers with torch's own product, in fp32 on the CPU."""
    for module in (module for part in parts for module in part.modules()):
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            continue
        if "forward" in vars(module) or module._compiled_call_impl is not None:
            continue
        weight = module._parameters.get("weight")
        if type(weight) is not nn.Parameter or weight.is_inference() or weight.numel() < LEAST:
            continue
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            yield module


def _multiply(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight, version = layer.weight, layer.weight._version
    held = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach())
    product = torch.ops.mkldnn._linear_pointwise.default

    def forward(x: Tensor) -> Tensor:
        same = layer._parameters.get("weight") is weight and weight._version == version
        if not same or x.numel() == layer.in_features or torch.is_grad_enabled():
            return nn.Linear.forward(layer, x)
        found: Tensor = product(x, held, layer.bias, "none", [], "")
        return found

    return forward

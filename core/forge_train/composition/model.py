"""The composed model: one or more local parts, behind one set of global names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..transform import Applied


class Model:
    """What `optimizer`, `executor` and `on_start` receive.

    A pipeline gives a rank several parts, each with holes where other stages were cut out, so names are global:
    layer 17 is `layers.17` on whatever rank it lies.
    """

    def __init__(self, parts: Sequence[nn.Module], applied: Sequence[Applied] = ()) -> None:
        self.parts = tuple(parts)
        self._switches = [a.on_micro_batch for a in applied if a.on_micro_batch]
        self._finishers = [a.after_backward for a in applied if a.after_backward]
        self._releasers = [a.release for a in applied if a.release]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, a tied one under its first name."""
        seen: set[int] = set()
        for part in self.parts:
            for name, parameter in part.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters():
            yield parameter

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module with its global name; the parts themselves have the empty one."""
        for part in self.parts:
            yield from part.named_modules()

    @property
    def roles(self) -> dict[str, str]:
        """Parameter name → `head`, `embedding`, … as the model declares it."""
        found: dict[str, str] = {}
        for part in self.parts:
            found |= getattr(part, "roles", {})
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers, without gradients, by global name; a tied parameter once."""
        state = {name: parameter.detach() for name, parameter in self.named_parameters()}
        for prefix, module in self.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    state[f"{prefix}.{name}" if prefix else name] = buffer
        return state

    def flops_per_token(self, sequence: int) -> float | None:
        """Forward and backward FLOPs per token as the parts declare them (causal attention, without the input
        embedding); None where one does not."""
        declared = [getattr(part, "flops_per_token", None) for part in self.parts]
        return sum(float(count(sequence)) for count in declared if count) if all(declared) else None

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)

    def on_micro_batch(self, last: bool) -> None:
        """Tell the transforms that a micro-batch begins; an executor calls it before each."""
        for switch in self._switches:
            switch(last)

    def after_backward(self) -> None:
        """Have the transforms finish the step's gradients."""
        for finish in self._finishers:
            finish()

    def release(self) -> None:
        """Have the transforms drop gathered copies of weights, after a forward without backward."""
        for release in self._releasers:
            release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of a model in one part."""
        (part,) = self.parts
        return part(*args, **kwargs)

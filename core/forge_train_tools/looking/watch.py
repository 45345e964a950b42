"""Records what passes through a model in one forward pass: states between layers, attention, what follows the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from forge_train_kit.activations import attention_weights, layers_of
from forge_train_kit.activations.heads import kernel_of
from forge_train_kit.activations.modules import tensors_in
from forge_train_kit.layers import AttentionOptions


class Watch:
    """Watches one part of a model.

    Args:
        part: of one process.
        heads: name of a layer → its heads whose attention is kept.
    """

    def __init__(self, part: nn.Module, heads: Mapping[str, Sequence[int]]) -> None:
        self.states: dict[str, Tensor] = {}
        """Layer → the residual stream after it, `[batch, tokens, dim]`; under an empty name, that before the first."""
        self.attention: dict[str, Tensor] = {}
        """Layer → weights of the chosen heads, `[heads, tokens, tokens]`."""
        self.behind: list[nn.Module] = []
        """Modules that follow the last layer, in the order of their calls: the final norm."""
        self._layers, self._depth = layers_of(part), 0
        self._undo: list[Callable[[], None]] = []
        for name in self._layers:
            layer = part.get_submodule(name)
            self._keep(layer.register_forward_pre_hook(self._before, with_kwargs=True))
            self._keep(layer.register_forward_hook(partial(self._after, name)))
            if (module := kernel_of(layer)) is not None and heads.get(name):
                self._watch_kernel(module, name, heads[name])
        for path, module in part.named_modules():
            around = any(f"{name}.".startswith(f"{path}.") or not path for name in self._layers)
            inside = any(f"{path}.".startswith(f"{name}.") for name in (*self._layers, "head"))
            if not (around or inside):
                self._keep(module.register_forward_pre_hook(self._enter))
                self._keep(module.register_forward_hook(self._leave))

    def close(self) -> None:
        """Leave the model as it was."""
        for undo in self._undo:
            undo()

    def _keep(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.states:
            self.states[""] = next(x for _, x in tensors_in((args, kwargs)))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.states[name] = next(x for _, x in tensors_in(output))
        self.behind.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self.states and not self._depth:
            self.behind.append(module)

    def _watch_kernel(self, module: Any, name: str, heads: Sequence[int]) -> None:
        kernel = module.kernel

        def watched(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
            self.attention[name] = attention_weights(query, key, options, heads)[0]
            return kernel(query, key, value, options)

        module.kernel = watched
        self._undo.append(partial(setattr, module, "kernel", kernel))


def why_without(layer: nn.Module) -> str:
    """The reason why a layer has no attention maps, in a clause."""
    for one in layer.modules():
        if callable(getattr(one, "recurrence", None)):
            return f"{type(one).__name__} carries a state along the text, and has no attention weights"
    return f"{type(layer).__name__} computes attention itself, and shows no queries and keys"

"""Has the run's kernel compute the attention of a `transformers` class, through the library's attention interface."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from forge_train import ConfigError
from forge_train.base.errors import describe
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.layers import AttentionKernel, AttentionOptions
from forge_train_kit.model import SlotCache, Slots

log = logging.getLogger("forge_train")

NAME = "forge"
"""The name of Forge's implementation. No mask function is registered for it, so classes make no masks."""
_PROBE = "forge_probe"
_PLAIN = ("scaling", "dropout", "sliding_window", "softcap", "s_aux", "document_ids")
"""Keywords of the interface that kernels support."""
_IGNORED = (
    *("is_causal", "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"),
    *("layer_past", "past_key_values", "past_key_value", "position_embeddings", "return_dict", "layer_idx"),
    *("output_router_logits", "logits_to_keep", "num_items_in_batch", "layer_head_mask", "head_mask"),
)
"""Keywords that have no effect on attention over whole sequences."""
_CAUSAL, _WINDOWED = "create_causal_mask", "create_sliding_window_causal_mask"
_CHANGES = ("or_mask_function", "and_mask_function", "block_sequence_ids")
"""Keywords of mask functions that change which tokens are seen."""


@dataclass
class Asked:
    """Requirements of a model's attention modules on a kernel, found by running the model on the meta device."""

    needs: KernelCapabilities = field(default_factory=KernelCapabilities)
    heads: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Module → query heads, key heads, features."""
    documents: set[int] = field(default_factory=set)
    """Modules that receive document ids."""


class ClassSlots:
    """The caches of a class's attention modules, for rows that are generated side by side. The class passes it on to
    them; for itself, it has no cache."""

    def __init__(self, slots: Slots) -> None:
        self._slots, self._made = slots, dict[int, SlotCache]()

    def of(self, module: nn.Module, options: AttentionOptions) -> SlotCache:
        """The cache of a module, which is made at its first call."""
        if id(module) not in self._made:
            self._made[id(module)] = SlotCache(self._slots, options.window)
        return self._made[id(module)]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """The interface's function: `[batch, heads, sequence, head_dim]` → `[batch, sequence, heads, head_dim]`."""
    caches: ClassSlots | None = keywords.pop("slots", None)
    options = _translated(module, attention_mask, keywords)
    given = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), options
    return module.kernel(*given) if caches is None else caches.of(module, options).attend(module.kernel, *given), None


AttentionInterface.register(NAME, attend)


def probe(model: nn.Module, call: Any) -> Asked | None:
    """Find the requirements of the attention modules; None for a class that computes attention itself.

    Args:
        model: on the meta device; its `config` chooses the implementation.
        call: runs the model with document ids.
    """
    asked, found = Asked(), list[AttentionOptions]()

    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **keywords: Any
    ) -> tuple[Tensor, None]:
        found.append(_translated(module, mask, keywords))
        asked.heads[id(module)] = (query.shape[1], key.shape[1], query.shape[-1])
        if found[-1].document_ids is not None:
            asked.documents.add(id(module))
        return torch.empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1], device=query.device), None

    masks: list[str] = []
    config: Any = model.config
    try:
        with attending(config, record), _masks_noted(model, masks):
            call()
    except ConfigError:
        raise
    except Exception as error:  # the class reads values, which meta tensors lack; its own attention is always correct
        log.info("%s computes attention itself: %s", type(model).__name__, describe(error))
        return None
    if not found or not _say_all(found, masks, getattr(config, "layer_types", None)):
        return None
    dims = {features for *_, features in asked.heads.values()}
    asked.needs = KernelCapabilities(
        windows=any(one.window is not None for one in found),
        soft_caps=any(one.soft_cap is not None for one in found),
        sinks=any(one.sinks is not None for one in found),
        head_dims=tuple(sorted(dims)),
    )
    return asked


@contextmanager
def attending(config: Any, function: Any) -> Iterator[None]:
    """Use this function of the library's interface for attention, and experts that run on the meta device."""
    AttentionInterface.register(_PROBE, function)
    own = config._attn_implementation
    config._attn_implementation = _PROBE
    experts = getattr(config, "_experts_implementation", None)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "batched_mm"  # the only one of the library's own that needs no values
    try:
        yield
    finally:
        config._attn_implementation = own
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = experts


def mixing(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    """A function for the interface whose output has the right shape and depends on all inputs in the graph."""
    given = query.sum() + key.sum() + value.sum()
    return given.expand(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


@contextmanager
def _masks_noted(model: nn.Module, made: list[str]) -> Iterator[None]:
    """Record the masks that the library's classes make in this block; `changed` if a mask shows other tokens."""

    def noting(name: str, function: Any) -> Any:
        def make(*arguments: Any, **keywords: Any) -> Any:
            changed = [key for key in _CHANGES if keywords.get(key) is not None]
            made.append("changed" if changed else name)
            return function(*arguments, **keywords)

        return make

    with ExitStack() as stack:
        for module in {sys.modules[type(one).__module__] for one in model.modules()}:
            for name, one in list(vars(module).items()):
                if name.startswith("create_") and name.endswith("mask") and callable(one):
                    stack.enter_context(patch.object(module, name, noting(name, one)))
        yield


def _say_all(found: Sequence[AttentionOptions], masks: Sequence[str], layers: Sequence[str] | None) -> bool:
    """Return True if the keywords of attention describe the masks completely; a kernel is given no masks."""
    if any(name not in (_CAUSAL, _WINDOWED) for name in masks):
        return False
    windows = sum(one.window is not None for one in found)
    if _WINDOWED not in masks:
        return True
    return windows == (len(found) if layers is None else sum(kind == "sliding_attention" for kind in layers))


def take(model: nn.Module, kernel: AttentionKernel, asked: Asked) -> None:
    """Have the attention modules call a kernel."""
    config: Any = model.config
    known = {id(one): one for module in model.modules() if (one := getattr(module, "config", None)) is not None}
    own = {key: one._attn_implementation for key, one in known.items() if hasattr(one, "_attn_implementation")}
    config._attn_implementation = NAME
    kept = {
        id(config),
        *(id(getattr(module, "config", None)) for module in model.modules() if id(module) in asked.heads),
    }
    for key in own.keys() - kept:  # of encoders, whose attention is the class's
        known[key]._attn_implementation = own[key]
    for module in model.modules():
        if id(module) in asked.heads:
            target: Any = module
            target.heads, target.kv_heads, features = asked.heads[id(module)]
            if not hasattr(target, "head_dim"):
                target.head_dim = features
            target.kernel = kernel


def _translated(module: Any, mask: Tensor | None, keywords: Mapping[str, Any]) -> AttentionOptions:
    """Translate the interface's keywords to a kernel's options.

    Raises:
        ConfigError: for a keyword that no kernel supports.
    """
    if mask is not None:
        raise ConfigError(f"hf: {type(module).__name__} makes its own attention mask, which no kernel accepts.")
    strange = [name for name, one in keywords.items() if one is not None and name not in (*_PLAIN, *_IGNORED)]
    if strange:
        raise ConfigError(
            f"hf: {type(module).__name__} passes {', '.join(strange)} to attention, which no kernel supports."
        )
    given = keywords.get
    return AttentionOptions(
        scale=given("scaling"),
        document_ids=given("document_ids"),
        window=given("sliding_window"),
        soft_cap=given("softcap"),
        sinks=given("s_aux"),
    )

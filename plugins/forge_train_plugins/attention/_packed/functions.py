"""Fused attention over packed documents, from torch and from flash-attn, each with the same few arguments."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from forge_train import ConfigError

from .versions import MODULES, choose, installed


class Bounds(NamedTuple):
    """Starts of documents among queries and keys, `[documents + 1]` int32 each; and the longest document."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


class PackedFunction(Protocol):
    """Causal attention inside each document; its last query is at its last key."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float, window: int | None
    ) -> Tensor:
        """`[tokens, heads, head_dim]` of all documents, concatenated → the same."""
        ...


def torch_function() -> PackedFunction | None:
    """`torch.nn.attention.varlen`, if this torch supports windows in it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    needed = {"scale", "window_size"}
    return of_torch(varlen_attn) if needed <= {*inspect.signature(varlen_attn).parameters} else None


def of_torch(varlen_attn: Any) -> PackedFunction:
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters  # newer than torch 2.11

    def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float, window: int | None) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        more: dict[str, Any] = {"enable_gqa": groups > 1} if grouped else {}
        if groups > 1 and not grouped:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out: Tensor = varlen_attn(
            query,
            key,
            value,
            bounds.queries,
            bounds.keys,
            bounds.most_queries,
            bounds.most_keys,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            **more,
        )
        return out

    return attend


def flash_function(wanted: str, device: torch.device, plugin: str) -> PackedFunction:
    """flash-attn's function, of the wanted version or of the newest that runs here.

    Raises:
        ConfigError: if there is none.
    """
    here = installed()
    major, minor = torch.cuda.get_device_capability(device)
    version = choose(wanted, here, major)
    if not version:
        found = f"flash-attn {', '.join(here)}" if here else "no flash-attn"
        raise ConfigError(
            f"{plugin}: no fused kernel for this device (compute capability {major}.{minor}): found {found}, and "
            f"torch {torch.__version__}."
        )
    return of_flash(importlib.import_module(MODULES[version]).flash_attn_varlen_func, version)


def of_flash(flash_attn_varlen_func: Any, version: str) -> PackedFunction:
    """flash-attn's versions differ in how they express no window, and in what they return besides the output."""
    unlimited = None if version == "4" else -1
    more: dict[str, Any] = {}
    if torch.are_deterministic_algorithms_enabled():
        if "deterministic" not in inspect.signature(flash_attn_varlen_func).parameters:
            raise ConfigError(
                f"run.deterministic: this flash-attn {version} has no deterministic backward pass; update it, or use "
                "another kernel."
            )
        more["deterministic"] = True

    def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float, window: int | None) -> Tensor:
        out = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=bounds.queries,
            cu_seqlens_k=bounds.keys,
            max_seqlen_q=bounds.most_queries,
            max_seqlen_k=bounds.most_keys,
            softmax_scale=scale,
            causal=True,
            window_size=(unlimited, unlimited) if window is None else (window - 1, 0),
            **more,
        )
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended

    return attend

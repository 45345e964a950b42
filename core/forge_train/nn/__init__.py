"""Layers that models are built from, forge's own and third parties' alike.

Every module here that owns parameters says how they start, `initial(name) → Init`, and every module with
non-persistent buffers fills them in `reset_buffers()`: models are built on the meta device, so what a constructor
computes is lost, and core calls both once memory is there.

Techniques stay out of this package. Importing it imports torch.
"""

from __future__ import annotations

from ..ground.tensors import full_tensor
from .basic import Embedding, LayerNorm, Linear, RMSNorm
from .cache import KVCache
from .declare import TensorStyle, decay_groups, depth_scaled, flops_per_token
from .rope import LinearScaling, Llama3Scaling, RoPE, Scaling, YarnScaling

__all__ = [
    "Embedding",
    "KVCache",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "RMSNorm",
    "RoPE",
    "Scaling",
    "TensorStyle",
    "YarnScaling",
    "decay_groups",
    "depth_scaled",
    "flops_per_token",
    "full_tensor",
]

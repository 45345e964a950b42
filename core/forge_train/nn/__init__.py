"""Layers that models are built from, both forge's own and third parties'.

Every module here that owns parameters declares how they start, `initial(name) → Init`, and every module with
non-persistent buffers fills them in `reset_buffers()`: models are built on the meta device, so the values that a
constructor computes are lost, and core calls both once memory is allocated.

This package also has what optimizers share (parameter groups, and updates of full matrices), what attention kernels
share (which keys a query sees, documents' bounds, and exact attention in tiles for devices without a fused kernel), and
what losses share (sums over chunks of a sequence, and one vector per sequence). Techniques stay out of it. Importing it
imports torch.
"""

from __future__ import annotations

from ..ground.tensors import full_tensor
from .at_rest import AtRest, at_rest
from .attention_dropout import AttentionDropout, DroppedWeights
from .basic import Embedding, LayerNorm, Linear, OffsetRMSNorm, RMSNorm
from .cache import KVCache
from .chunks import sum_in_chunks
from .declare import TensorStyle, depth_scaled, flops_per_token
from .dropout import Dropout
from .groups import decay_groups, decays, parameter_groups
from .matrices import fused_rows, hidden_matrices
from .matrix_optimizer import MatrixOptimizer
from .narrow_state import NarrowState, narrowed
from .pooling import POOLING, Pooling, gather_rows, pair_weights, pool, prepare_pooling
from .rope import LinearScaling, Llama3Scaling, RoPE, Scaling, YarnScaling
from .rope_by_length import DynamicRoPE, LengthRoPE, LongRoPE
from .spans import PerBatch, document_bounds, first_visible, is_imagined, neighbours
from .tiled import LargestLogit, TiledAttention
from .update_rule import Kept, UpdateRule

__all__ = [
    "POOLING",
    "AtRest",
    "AttentionDropout",
    "Dropout",
    "DroppedWeights",
    "DynamicRoPE",
    "Embedding",
    "KVCache",
    "Kept",
    "LargestLogit",
    "LayerNorm",
    "LengthRoPE",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPE",
    "MatrixOptimizer",
    "NarrowState",
    "OffsetRMSNorm",
    "PerBatch",
    "Pooling",
    "RMSNorm",
    "RoPE",
    "Scaling",
    "TensorStyle",
    "TiledAttention",
    "UpdateRule",
    "YarnScaling",
    "at_rest",
    "decay_groups",
    "decays",
    "depth_scaled",
    "document_bounds",
    "first_visible",
    "flops_per_token",
    "full_tensor",
    "fused_rows",
    "gather_rows",
    "hidden_matrices",
    "is_imagined",
    "narrowed",
    "neighbours",
    "pair_weights",
    "parameter_groups",
    "pool",
    "prepare_pooling",
    "sum_in_chunks",
]

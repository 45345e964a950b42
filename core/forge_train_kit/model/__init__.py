"""Layers that models are built from, both forge's own and third parties'.

Every module here that owns parameters declares how they start, `initial(name) → Init`, and every module with
non-persistent buffers fills them in `reset_buffers()`: models are built on the meta device, so the values that a
constructor computes are lost, and core calls both once memory is allocated.

It also has what attention kernels share (which keys a query sees, documents' bounds, and exact attention in tiles for
devices without a fused kernel), and what losses share (sums over chunks of a sequence, and one vector or one
log-probability per sequence).
Techniques stay out of it. Importing it imports torch.
"""

from __future__ import annotations

from forge_train.mesh.tensors import full_tensor

from .attention_dropout import AttentionDropout, DroppedWeights
from .basic import Embedding, LayerNorm, Linear, OffsetRMSNorm, RMSNorm
from .cache import KVCache
from .choices import record_choices
from .chunks import sum_in_chunks
from .declare import TensorStyle, depth_scaled, elements_trained, flops_per_token
from .dropout import Dropout
from .dtypes import dtype_borders
from .encoders import Encoders
from .in_sequence import Enter, InSequence
from .item_positions import ITEM_POSITIONS, ItemPositions, Shift, SlotShift
from .kinds import Kinds, Note, Rows
from .log_probabilities import answers_of, row_log_probabilities, token_log_probabilities
from .places import filled
from .pooling import POOLING, Pooling, gather_rows, pair_weights, pool, prepare_pooling, sum_of_slices
from .rope import LinearScaling, Llama3Scaling, RoPE, Scaling, SectionedRoPE, YarnScaling
from .rope_by_length import DynamicRoPE, LengthRoPE, LongRoPE
from .samples import gather_samples
from .slots import PositionMemory, RowMemory, SlotCache, Slots
from .spans import PerBatch, document_bounds, first_visible, is_imagined, last_visible, neighbours
from .tiled import LargestLogit, TiledAttention
from .updates import trained_beside, updated_already, without_updates
from .whole_rows import rows_are_whole, whole_rows

__all__ = [
    "ITEM_POSITIONS",
    "POOLING",
    "AttentionDropout",
    "Dropout",
    "DroppedWeights",
    "DynamicRoPE",
    "Embedding",
    "Encoders",
    "Enter",
    "InSequence",
    "ItemPositions",
    "KVCache",
    "Kinds",
    "LargestLogit",
    "LayerNorm",
    "LengthRoPE",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPE",
    "Note",
    "OffsetRMSNorm",
    "PerBatch",
    "Pooling",
    "PositionMemory",
    "RMSNorm",
    "RoPE",
    "RowMemory",
    "Rows",
    "Scaling",
    "SectionedRoPE",
    "Shift",
    "SlotCache",
    "SlotShift",
    "Slots",
    "TensorStyle",
    "TiledAttention",
    "YarnScaling",
    "answers_of",
    "depth_scaled",
    "document_bounds",
    "dtype_borders",
    "elements_trained",
    "filled",
    "first_visible",
    "flops_per_token",
    "full_tensor",
    "gather_rows",
    "gather_samples",
    "is_imagined",
    "last_visible",
    "neighbours",
    "pair_weights",
    "pool",
    "prepare_pooling",
    "record_choices",
    "row_log_probabilities",
    "rows_are_whole",
    "sum_in_chunks",
    "sum_of_slices",
    "token_log_probabilities",
    "trained_beside",
    "updated_already",
    "whole_rows",
    "without_updates",
]

"""A small language for names and tensors: how to make the tensors of one layout from those of another.

A map is built from operations: `one >> other` applies them in order, `one | other` side by side. It has an inverse.
From names, shapes and dtypes it makes a `Plan`, or lists everything that does not fit, without reading a tensor. A plan
reads a tensor, or any range of it, from only the ranges that it needs. Importing this package does not import torch.
"""

from __future__ import annotations

from forge_train.store.shards import Box

from .flat import Flatten, Unflatten
from .growth import Renumber, Repeat
from .maps import Chain, Group, Plan, StateMap, Step, Together
from .quantised import Dequantise, DequantiseMXFP4
from .rules import Concat, Drop, Rename, Split, Stack, Unstack
from .values import Cast, Resize, Rotary, Transpose, Unread
from .views import Fetch, View

__all__ = [
    "Box",
    "Cast",
    "Chain",
    "Concat",
    "Dequantise",
    "DequantiseMXFP4",
    "Drop",
    "Fetch",
    "Flatten",
    "Group",
    "Plan",
    "Rename",
    "Renumber",
    "Repeat",
    "Resize",
    "Rotary",
    "Split",
    "Stack",
    "StateMap",
    "Step",
    "Together",
    "Transpose",
    "Unflatten",
    "Unread",
    "Unstack",
    "View",
]

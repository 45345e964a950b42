"""A small language for names and tensors: how the tensors of one layout are made of those of another.

A map is built from operations, `one >> other` one after the other and `one | other` side by side, and has an inverse.
Given the names, shapes and dtypes at hand it makes a `Plan`, or names everything that does not fit; no tensor is read
for that. A plan reads a tensor, or any range of it, from just the ranges that it is made of. Importing this package
imports no torch.
"""

from __future__ import annotations

from .maps import Chain, Group, Plan, StateMap, Step, Together
from .quantised import Dequantise, DequantiseMXFP4
from .rules import Concat, Drop, Rename, Split, Stack, Unstack
from .values import Cast, Resize, Rotary, Transpose
from .views import Box, Fetch, View

__all__ = [
    "Box",
    "Cast",
    "Chain",
    "Concat",
    "Dequantise",
    "DequantiseMXFP4",
    "Drop",
    "Fetch",
    "Group",
    "Plan",
    "Rename",
    "Resize",
    "Rotary",
    "Split",
    "Stack",
    "StateMap",
    "Step",
    "Together",
    "Transpose",
    "Unstack",
    "View",
]

"""Activations of a model at work: read at modules that patterns name, and changed there, on every layout.

`Recorder` is what a plugin needs to keep activations of a training step or an evaluation: what the ranks of a layout
hold of an activation is put together to what one process computes, with the sample and the position of each row.

Importing it imports torch.
"""

from __future__ import annotations

from .attention import attention_weights
from .edit import Edit, Interventions, OfInput, Positions
from .heads import HeadColumns, head_columns, layer_names, layers_of
from .layout import Layouts, Piece
from .modules import matched_modules
from .record import Recorder, Reduce
from .whole import Recorded

__all__ = [
    "Edit",
    "HeadColumns",
    "Interventions",
    "Layouts",
    "OfInput",
    "Piece",
    "Positions",
    "Recorded",
    "Recorder",
    "Reduce",
    "attention_weights",
    "head_columns",
    "layer_names",
    "layers_of",
    "matched_modules",
]

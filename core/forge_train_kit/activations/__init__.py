"""Activations of a model at work: read at modules that patterns name, and changed there, on every layout.

`Recorder` is what a plugin needs to keep activations of a training step or an evaluation: what the ranks of a layout
hold of an activation is put together to what one process computes, with the sample and the position of each row.

Importing it imports torch.
"""

from __future__ import annotations

from .layout import Layouts, Piece, matched_modules
from .record import Recorder, Reduce
from .whole import Recorded

__all__ = ["Layouts", "Piece", "Recorded", "Recorder", "Reduce", "matched_modules"]

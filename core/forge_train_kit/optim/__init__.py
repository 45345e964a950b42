"""Building blocks of optimizers: parameter groups, updates of full matrices however they are sharded, and state in
fewer bits than the optimizer computes in. Importing it imports torch.
"""

from __future__ import annotations

from .at_rest import AtRest, at_rest
from .groups import decay_groups, decays, parameter_groups, state_of
from .matrices import fused_rows, hidden_matrices
from .matrix_optimizer import MatrixOptimizer
from .narrow_state import NarrowState, narrowed
from .update_rule import Kept, UpdateRule
from .updating import UpdatingOptimizer

__all__ = [
    "AtRest",
    "Kept",
    "MatrixOptimizer",
    "NarrowState",
    "UpdateRule",
    "UpdatingOptimizer",
    "at_rest",
    "decay_groups",
    "decays",
    "fused_rows",
    "hidden_matrices",
    "narrowed",
    "parameter_groups",
    "state_of",
]

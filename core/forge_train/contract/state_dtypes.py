"""In what dtypes an optimizer holds its state, as its section says."""

from __future__ import annotations

from typing import Literal

from ..config.schema import section

StateDtype = Literal["fp32", "bf16", "8bit", "4bit"]
"""`8bit` and `4bit` as in the names of bitsandbytes and torchao (`AdamW8bit`): codes of a table are no integers."""


@section
class StateDtypes:
    """Dtypes at rest: an optimizer's `state`. Every update is computed in fp32."""

    first: StateDtype = "fp32"
    """Of the running mean of gradients, rounded stochastically; refused where the optimizer has none. 8bit and 4bit
    need a second moment, if there is one, of no more bits. Vectors and tensors below 4,096 elements stay fp32."""
    second: StateDtype = "fp32"
    """Of the running mean of their squares, likewise."""
    masters: bool = True
    """With parameters that are bf16 at rest: whether fp32 copies of them are kept and updated. Without, updates are
    rounded into the parameters stochastically."""

"""In what dtypes an optimizer holds its state, as its section says."""

from __future__ import annotations

from typing import Literal

from ..config.schema import section

StateDtype = Literal["fp32", "bf16"]


@section
class StateDtypes:
    """Dtypes at rest: an optimizer's `state`. Every update is computed in fp32."""

    first: StateDtype = "fp32"
    """Of the running mean of gradients; bf16 is rounded stochastically. Refused where the optimizer has none."""
    second: StateDtype = "fp32"
    """Of the running mean of their squares, likewise."""
    masters: bool = True
    """With parameters that are bf16 at rest: whether fp32 copies of them are kept and updated. Without, updates are
    rounded into the parameters stochastically."""

"""Sections that optimizers have in common. Importing this module imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from forge_train.config.schema import Ge, Gt, Lt, section

__all__ = ["Beta", "OptimizerSection", "ParameterGroup", "StateDtype", "StateDtypes"]

Beta = Annotated[float, Ge(0), Lt(1)]
"""Decay of a running mean."""

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


@section
class ParameterGroup:
    """Parameters whose names match a pattern, and their own options: an item of an optimizer's `groups`."""

    match: str
    """Names, with `*`, `?` and `[…]` as in a shell: `layers.*.attention.*`. `*` matches dots too."""
    lr: Annotated[float, Gt(0)] = 1.0
    """Factor on the learning rate, at every step of the schedule."""
    weight_decay: Annotated[float, Ge(0)] | None = None
    """Of all that match, vectors included; without it, they decay as they would without the group."""


@section
class OptimizerSection:
    """Options of every optimizer whose groups come from `decay_groups` and whose state from `narrowed`."""

    lr: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Of matrices; norms and biases do not decay."""
    decay_embeddings: bool = False
    """Decay the embedding too, which shrinks rows of rare tokens between their occurrences."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters by pattern, with a learning rate or a decay of their own."""
    state: StateDtypes = StateDtypes()
    """Dtypes of the state, and masters."""

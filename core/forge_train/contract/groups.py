"""Groups of parameters, as a user names them in an optimizer's section."""

from __future__ import annotations

from typing import Annotated

from ..config.schema import Ge, Gt, section


@section
class ParameterGroup:
    """Parameters whose names match a pattern, and what is different for them: an item of an optimizer's `groups`."""

    match: str
    """Names, with `*`, `?` and `[…]` as in a shell: `layers.*.attention.*`. `*` matches dots too."""
    lr: Annotated[float, Gt(0)] = 1.0
    """Factor on the learning rate, at every step of the schedule."""
    weight_decay: Annotated[float, Ge(0)] | None = None
    """Of all that match, vectors included; without it, they decay as they would without the group."""

"""A step in fp16 whose gradients overflow on one side alone."""

from __future__ import annotations

from dataclasses import dataclass

from .follow import Followed
from .ranks import overflows
from .recording import Recording


@dataclass(frozen=True)
class Overflow:
    """The first such step: from there, two runs take other steps at other loss scales."""

    step: int
    here: bool
    """True if one process leaves out the step, False if the layout does."""
    promised: bool
    """True if docs/guarantees.md allows for it on this layout."""

    @classmethod
    def find(cls, one: Recording, layout: Recording, followed: Followed) -> Overflow | None:
        ours, theirs = overflows(one.first), overflows(layout.first)
        if not ours ^ theirs:
            return None
        step, sizes = min(ours ^ theirs), layout.layout
        may = {(False, True): sizes.tp * sizes.cp > 1, (True, False): sizes.ep > 1}
        found = {(step in theirs, step in ours), *(at.finite for at in followed.steps)}
        return cls(step, step in ours, all(may.get(finite, True) for finite in found))

    def __str__(self) -> str:
        sides = ("one process", "the layout") if self.here else ("the layout", "one process")
        found = f"At step {self.step} the gradients overflow fp16 on {sides[0]} alone, and {sides[1]} takes the step"
        if self.promised:
            sums = (
                "tp and cp sum in parts what one process sums at once"
                if self.here
                else "ep sums at once an expert's tokens of several ranks, and one process those of a micro-batch"
            )
            return (
                f"{found}: {sums} (docs/guarantees.md). From there the two runs differ although nothing is wrong, so "
                "losses and norms are compared from the layout's weights. A lower initial loss scale keeps both sides "
                "from overflowing."
            )
        return (
            f"{found}: the layout scales the loss otherwise, or sums other parts at once than docs/guarantees.md says. "
            "To tell which, compare without a scale (train.precision=fp32); under a lower initial loss scale neither "
            "side overflows."
        )

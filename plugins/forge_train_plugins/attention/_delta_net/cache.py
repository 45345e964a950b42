"""The memory of a layer of gated DeltaNet while text is generated."""

from __future__ import annotations

from torch import Tensor


class DeltaCache:
    """The states of one layer and the last inputs of its convolutions. Its size does not depend on the length.

    Args:
        batch: number of sequences generated side by side.
        length: largest number of positions.
    """

    def __init__(self, batch: int, length: int) -> None:
        self.batch = batch
        self.capacity = length
        self.length = 0
        """Number of positions so far."""
        self.held: list[Tensor] = []
        """The state, `[batch, heads, k_dim, v_dim]` in fp32; then of queries, keys and values `[batch, taps - 1, heads,
        features]`. Nothing at the beginning."""

    def expect(self, batch: int, positions: int) -> None:
        """Check that these positions fit.

        Raises:
            ValueError: if they do not.
        """
        if self.length + positions > self.capacity or batch != self.batch:
            raise ValueError(
                f"DeltaCache is for {self.batch} sequences of at most {self.capacity} positions; this would make it "
                f"{batch} of {self.length + positions}."
            )

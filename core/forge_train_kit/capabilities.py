"""Capabilities of attention kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_train import Plugin

__all__ = ["KernelCapabilities", "capabilities_of"]


@dataclass(frozen=True, slots=True)
class KernelCapabilities:
    """Capabilities of an attention kernel, or those requested of one.

    A kernel supports the option of each capability that it declares (`AttentionOptions`), and refuses the others.
    """

    documents: bool = False
    """`document_ids`: tokens see their own document only."""
    offsets: bool = False
    """`offset`, and more keys than queries: queries at other positions than keys."""
    windows: bool = False
    """`window`: a query sees so many positions, its own the last of them."""
    dropout: bool = False
    """`dropout`: weights named by a `DroppedWeights` are set to zero after the softmax, and the others are divided by
    the rest."""
    soft_caps: bool = False
    """`soft_cap`: logits become `cap · tanh(logits / cap)` (Gemma 2, arXiv:2408.00118)."""
    sinks: bool = False
    """`sinks`: a logit for each head that takes part in the softmax and has no value (arXiv:2309.17453)."""
    log_sum_exp: bool = False
    """`log_sum_exp=True`: also returns the logarithm of each query's sum of exponentials."""
    blocks: bool = False
    """`query_document_ids`, and an `offset` beyond the keys: these are a block, of which a query may see nothing."""
    lengths: bool = False
    """`lengths`: one query for each row, and rows with different numbers of keys."""
    prefixes: bool = False
    """`prefix_ends`: queries of a prefix see all of it, what comes after them too."""
    head_dims: tuple[int, ...] = ()
    """Features per head; as a capability, empty is any."""

    def lacks(self, asked: KernelCapabilities) -> Iterator[str]:
        """Yield a phrase for each requested capability that is missing."""
        for one in fields(self):
            mine, wanted = getattr(self, one.name), getattr(asked, one.name)
            if isinstance(mine, bool):
                if wanted and not mine:
                    yield _PHRASES[one.name]
            elif mine and (missing := [value for value in wanted if value not in mine]):
                yield _PHRASES[one.name].format(missing[0])


_PHRASES = {
    "documents": "document masks",
    "offsets": "queries at other positions than keys",
    "windows": "sliding windows",
    "dropout": "dropout of attention weights",
    "soft_caps": "soft caps",
    "sinks": "sinks",
    "log_sum_exp": "the log-sum-exp",
    "blocks": "keys in blocks, of which a query may see none",
    "lengths": "rows with different numbers of keys",
    "prefixes": "prefixes that see all of themselves",
    "head_dims": "heads of {} features",
}


def capabilities_of(plugin: type[Plugin]) -> KernelCapabilities:
    """Return what a plugin's class attribute `kernel_capabilities` declares of its attention kernel.

    Kernels that are not enabled are parsed as text: write `kernel_capabilities = KernelCapabilities(…)` with literals.
    """
    declared: KernelCapabilities = getattr(plugin, "kernel_capabilities", KernelCapabilities())
    return declared

"""Declarations of models and optimizers, computed in one place."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from forge_train import Model

TensorStyle = Literal[
    "vocabulary",
    "colwise",
    "rowwise",
    "partial",
    "sequence",
    "gather",
    "tokens",
    "summed",
    "heads",
    "features",
    "channels",
    "logits",
]
"""Tensor-parallel style of a module; a model's `tensor_plan()` maps module names to styles.

* `vocabulary`: an embedding with its rows split; its output is summed over the ranks and split along the sequence.
* `colwise`: a linear with its output features split; each rank continues with its own.
* `rowwise`: a linear with its input features split; its output is summed and split along the sequence.
* `partial`: the same as `rowwise`, within a block that is `summed`: its output stays a part of the sum.
* `sequence`: works on each token independently; its weights are not split, and its input is split along the sequence.
  If the module has `sequence_piece`, it is set to (index of the piece, number of pieces): `(0, 1)` if sequences are not
  split.
* `gather`: a block that needs full sequences: its input, split along the sequence, is gathered.
* `tokens`: a block that processes each token independently: it works on this rank's share of them, with unsplit
  weights. If the module has `sequence_piece`, it is set as for `sequence`; sequences are always split.
* `summed`: a block that needs full sequences and splits its own weights: its input is gathered, and its output is
  summed and split along the sequence; for a tuple, its first element.
* `heads`: its weights are not split, and its input is this rank's heads, so its gradient is summed over the ranks. If
  the module has `heads_piece`, it is set to (index of this rank's heads, number of pieces).
* `features`: an RMSNorm over split output features, with its weights split too; the mean square is over all ranks.
* `channels`: works on each output feature, or each head, independently (a depthwise convolution): its own parameters
  are split along their first axis, and its forward uses this rank's part of each (`to_local()` of a DTensor).
* `logits`: the head, with its output features split.
"""


def depth_scaled(std: float, layers: int) -> float:
    """`std / √(2 · layers)`, for the projections that write into the residual stream, of which there are two per layer
    (GPT-2; Radford et al. 2019, §2.3): their sum then keeps its variance at any depth."""
    return std / math.sqrt(2 * layers)


def flops_per_token(sequence: int, *, weights: int, width: int = 0, window: int | None = None) -> int:
    """Floating-point operations of a forward and a backward pass per token (PaLM, arXiv:2204.02311, appendix B).

    Args:
        sequence: tokens per sequence.
        weights: elements of all weight matrices that a token is multiplied by: 2 operations each, three times.
        width: heads × head_dim of causal attention: logits and weighted sum cost 2 operations each per key, three
            times, and a query sees half of the sequence on average.
        window: largest number of keys that a query sees; all by default.
    """
    if window is not None and window < sequence:
        return 6 * weights + 12 * width * window * (2 * sequence - window) // (2 * sequence)
    return 6 * weights + 6 * sequence * width


def elements_trained(model: Model, *, later: bool = False) -> int:
    """Number of a model's elements that the first step trains. Of a parameter with gradients, a module may declare that
    only some are: `trained_at_first = {"weight": 256}`, or 0 where it is frozen when the run begins.

    Args:
        model: composed.
        later: whether to count those of the latter too.
    """
    left = {id(parameter) for _, parameter in model.named_parameters()}  # without what another part has
    count = 0
    for _, module in model.named_modules():
        declared = getattr(module, "trained_at_first", {})
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) in left:
                left.remove(id(parameter))
                own = declared.get(name, parameter.numel())
                count += parameter.numel() if later and own == 0 else own
    return count

"""Dropout that is the same on every layout."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train.base.errors import PluginError
from forge_train.contract.batch import Batch

if TYPE_CHECKING:
    from forge_train.plugin.job import Job


class Salted(nn.Module):
    """A module whose random numbers are a function of the run's seed, its own name and the sample.

    Args:
        job: gives the seed and the numbers of the samples.
        name: modules with the same name have the same random numbers.
    """

    salt: Tensor

    def __init__(self, job: Job, name: str) -> None:
        super().__init__()
        self._step = job.step
        self._salt = int.from_bytes(hashlib.blake2b(f"{job.seed} {name}".encode(), digest_size=4).digest(), signed=True)
        # A tensor, so that one layer's compiled code serves all layers.
        self.register_buffer("salt", torch.empty((), dtype=torch.int32), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Set the number that makes this module's random numbers different from those of other modules."""
        self.salt = torch.full_like(self.salt, self._salt)

    def batch(self, whose: str) -> tuple[Batch, Tensor]:
        """The micro-batch that passes through the model, and the numbers of its samples.

        Raises:
            PluginError: if there is none.
        """
        batch = self._step.batch
        if batch is None or batch.sample_ids is None:
            raise PluginError(
                f"{whose} in training does not know which samples pass through it: call it while a step trains the "
                "model, or put the model into evaluation mode."
            )
        return batch, batch.sample_ids


def check_rate(whose: str, rate: float) -> float:
    """Raises ValueError for a rate that dropout can't have."""
    if not 0 <= rate < 1:
        raise ValueError(f"{whose} takes a rate of at least 0 and less than 1, found {rate}.")
    return rate


class Dropout(Salted):
    """In training, zeroes features at random and divides the others by 1 − rate (Srivastava et al. 2014).

    The mask is a function of the run's seed, this module's name, the sample, the position in the sample's row, and the
    feature. So it does not depend on micro-batches or ranks, a recomputed forward pass repeats it, and a resumed run
    continues with it. Samples are numbered through the whole run: no step repeats a number.

    The input is `[batch, sequence, …]`, with all features on each rank unless `features_piece` says otherwise. If
    tensor parallelism splits it along the sequence, the model's `tensor_plan()` declares the module as `sequence`.

    Args:
        rate: share of features that is zeroed, at least 0 and less than 1.
        job: gives the seed and the numbers of the samples.
        name: modules with the same name have the same masks; usually the module's path in the model.

    Raises:
        ValueError: for a rate outside this range.
    """

    def __init__(self, rate: float, job: Job, name: str) -> None:
        super().__init__(job, name)
        self.rate = check_rate("Dropout", rate)
        self.sequence_piece = (0, 1)
        """Index of this rank's piece of each sequence, and number of pieces; set by tensor parallelism."""
        self.features_piece = (0, 1)
        """The same of the features `[…]`, where a rank holds equal pieces of them; set by whoever splits them."""

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, sequence, …]` → the same.

        Raises:
            PluginError: in training, outside a step, or if `x` has another size than the micro-batch.
        """
        if not self.training or not self.rate:
            return x
        keep = self._bits(x) >= round(self.rate * 2**32) - 2**31
        return torch.where(keep, x * (1 / (1 - self.rate)), 0.0)

    def _bits(self, x: Tensor) -> Tensor:
        """An int32 for every feature; all values are equally likely."""
        samples, positions = self._place(x)
        tokens = mixed(mixed(samples.int() ^ self.salt)[:, None] + positions.int())
        rest = x.shape[2:]
        first = self.features_piece[0] * rest.numel()
        features = mixed(torch.arange(first, first + rest.numel(), dtype=torch.int32, device=x.device)).view(rest)
        return mixed(tokens.view(*tokens.shape, *[1] * len(rest)) ^ features)

    def _place(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of samples, and their positions in the rows."""
        batch, samples = self.batch("A Dropout")
        length = batch.inputs.shape[1]
        piece, pieces = self.sequence_piece
        each = -(-length // pieces)
        if x.shape[:2] != (len(samples), each):
            raise PluginError(
                f"A Dropout was given {list(x.shape[:2])} sequences and positions, but the micro-batch has "
                f"{[len(samples), each]}; where tensor parallelism splits sequences, the model's tensor_plan() "
                "must name it as 'sequence'."
            )
        positions = torch.arange(length, device=x.device) if batch.positions is None else batch.positions
        if pieces > 1:  # the last piece may be padded with positions that are never read
            positions = F.pad(positions, (0, each * pieces - length))[piece * each : (piece + 1) * each]
        return samples, positions


def mixed(x: Tensor) -> Tensor:
    """A permutation of all int32 in which every bit of `x` flips each bit of the result half of the time (“lowbias32”,
    Wellons 2018, nullprogram.com/blog/2018/07/31)."""
    x = (x ^ _shifted(x, 16)) * 0x7FEB352D
    x = (x ^ _shifted(x, 15)) * (0x846CA68B - 2**32)
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
